"""Tests that take long: clusters of Ray, many killed workers, hundreds of steps; `make test-scale` runs them."""

import os

if not os.environ.get("DIGENRL_SCALE_TESTS"):
    collect_ignore_glob = ["*.py"]
