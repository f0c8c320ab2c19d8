"""Where workers run: resources of a cluster, set aside by role."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from digenrl.engines.engine import NoRoom, Requirements

_STRATEGIES = {"trainer": "PACK"}  # close to each other; others are spread, so that a host's loss costs few
_ANY_HOST = {"CPU": 0.001}  # a bundle must ask for something, and a head that is to do no work has no CPU
_POLL_S = 0.02
_MOVE_S = 10.0  # in which Ray moves what a lost host had to one that has room; another host may come for trainers only
_SYSTEM_RESOURCES = ("node:", "memory", "object_store_memory")

Resources = dict[str, float]


@dataclass
class _Role:
    """Workers that are placed together."""

    group: PlacementGroup
    workers: dict[str, int]
    """Each one's bundle."""
    is_waited_for: bool
    """Whether the run cannot go on without one of them."""


class Placement:
    """The resources of a run: a placement group for each role, a bundle for each worker, or unit of workers."""

    def __init__(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for resources that others use."""
        self._timeout_s = timeout_s
        self._roles: list[_Role] = []
        self._requirements: dict[str, Requirements] = {}

    def reserve(self, workers: Mapping[str, Requirements]) -> list[str]:
        """Set aside what workers that are new need, and wait until it is there; returns their names.

        Raises:
            ValueError: the cluster does not have it.
            NoRoom: others use it.
        """
        new = {worker: needs for worker, needs in workers.items() if worker not in self._requirements}
        units = {role: _units(new, role) for role in dict.fromkeys(needs.role for needs in new.values())}
        bundles = {role: [_bundle(new, unit) for unit in units[role]] for role in units}
        check_resources(bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        roles = []
        for role, of_role in bundles.items():
            group = placement_group(
                [{**_ANY_HOST, **bundle} for bundle in of_role], strategy=_STRATEGIES.get(role, "SPREAD")
            )
            roles.append(_Role(group, {}, role == "trainer"))
        self._roles += roles
        self._requirements.update(new)
        for name, placed in zip(bundles, roles, strict=True):
            self._await(placed.group, f"the {_plural(name)}", self._timeout_s)
            order = _by_node(placed.group, len(bundles[name]))
            for unit, index in zip(units[name], order, strict=True):
                placed.workers.update(dict.fromkeys(unit, index))
        return list(new)

    def options(self, worker: str) -> dict[str, Any]:
        """Give the options of an actor that is to run where a worker is placed; waits if its host was lost.

        Raises:
            NoRoom: no other host has room.
        """
        for role in self._roles:
            if worker in role.workers:
                timeout_s = self._timeout_s if role.is_waited_for else min(self._timeout_s, _MOVE_S)
                self._await(role.group, f"worker {worker}", timeout_s, role.workers[worker])
                strategy = PlacementGroupSchedulingStrategy(role.group, role.workers[worker])
                return {"scheduling_strategy": strategy, "num_gpus": self.num_gpus(worker)}
        return {}

    def num_gpus(self, worker: str) -> float:
        """Give how many GPUs a worker has."""
        needs = self._requirements.get(worker)
        return 0 if needs is None else needs.resources.get("GPU", needs.num_gpus)

    def release(self) -> None:
        """Give all back."""
        if ray.is_initialized():
            for role in self._roles:
                remove_placement_group(role.group)
        self._roles, self._requirements = [], {}

    def _await(self, group: PlacementGroup, who: str, timeout_s: float, bundle: int | None = None) -> None:
        """Wait until a bundle of a group, or all of it, is on hosts that live."""
        end_s = time.monotonic() + timeout_s
        while not _is_placed(table := placement_group_table(group), bundle):
            if time.monotonic() > end_s:
                raise NoRoom(
                    f"{who} could not be placed on the cluster within {timeout_s:g} s ({table['state'].lower()}): "
                    f"of its resources, {_said(ray.available_resources())} are free."
                )
            time.sleep(_POLL_S)


def _is_placed(table: Mapping[str, Any], bundle: int | None) -> bool:
    """Whether a bundle has a host that lives, or all have; a group may have lost others than this one."""
    if bundle is None:
        return bool(table["state"] == "CREATED")
    node = table["bundles_to_node_id"].get(bundle)
    return bool(node) and any(entry["Alive"] and entry["NodeID"] == node for entry in ray.nodes())


def check_resources(bundles: Mapping[str, Sequence[Resources]], hosts: Sequence[Resources]) -> None:
    """Check that a cluster has what is asked for.

    Args:
        bundles: what is needed on one host each, by role.
        hosts: what each has.

    Raises:
        ValueError: one of them, or all of them together, have less.
    """
    total = _sum(hosts)
    hosts = [host for host in hosts if host.get("CPU", 0) > 0]
    for role, of_role in bundles.items():
        for bundle in of_role:
            if not any(all(host.get(name, 0) >= amount for name, amount in bundle.items()) for host in hosts):
                raise ValueError(
                    f"the {_plural(role)} need {_said(bundle or {'CPU': 1})} on one host each, and no host of the "
                    f"cluster has that: in all it has {_said(total)}; see `{role}_resources`."
                )
    asked = _sum([bundle for of_role in bundles.values() for bundle in of_role])
    if any(total.get(name, 0) < amount for name, amount in asked.items()):
        counts = ", ".join(f"{len(of_role)} {_plural(role)}" for role, of_role in bundles.items())
        raise ValueError(f"{counts} need {_said(asked)} together, but the cluster has only {_said(total)}.")


def _units(workers: Mapping[str, Requirements], role: str) -> list[list[str]]:
    """Give the workers of a role, those of one unit together."""
    units: dict[str, list[str]] = {}
    for worker, needs in workers.items():
        if needs.role == role:
            units.setdefault(needs.unit or worker, []).append(worker)
    return list(units.values())


def _bundle(workers: Mapping[str, Requirements], unit: Sequence[str]) -> Resources:
    needs = [{"GPU": float(workers[worker].num_gpus), **workers[worker].resources} for worker in unit]
    return {name: amount for name, amount in _sum(needs).items() if amount}


def _by_node(group: PlacementGroup, num_bundles: int) -> list[int]:
    """Order a group's bundles so that those of one host follow each other, as consecutive ranks do best."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    first = {node: index for index, node in sorted(nodes.items(), reverse=True)}
    return sorted(range(num_bundles), key=lambda index: (first[nodes[index]], index))


def _sum(resources: Sequence[Mapping[str, float]]) -> Resources:
    return {name: sum(entry.get(name, 0) for entry in resources) for entry in resources for name in entry}


def _plural(role: str) -> str:
    return role.replace("_", " ") + "s"


def _said(resources: Mapping[str, float]) -> str:
    named = {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(_SYSTEM_RESOURCES) and "_group_" not in name
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in named.items()) or "nothing"
