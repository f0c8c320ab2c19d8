"""Workers on the hosts of a Ray cluster.

Needs Ray: importing this package raises an `ImportError` that says how to install it.
"""

try:
    import ray as _  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("engine `ray` needs the package ray; install it with `pip install 'digenrl[ray]'`.") from error

from digenrl.engines.ray.engine import RayEngine

__all__ = ["RayEngine"]
