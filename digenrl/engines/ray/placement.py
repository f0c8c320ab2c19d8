"""Where workers run: resources of a cluster, set aside by role."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from digenrl.engines.engine import NoRoom, Requirements

log = logging.getLogger(__name__)

_STRATEGIES = {"trainer": "PACK"}  # close to each other; others are spread, so that a host's loss costs few
_ANY_HOST = {"CPU": 0.001}  # a bundle must ask for something, and a head that is to do no work has no CPU
_POLL_S = 0.02
_HOLD_S = 5.0  # for which a part of what a run needs is held while the rest is not there
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
        for needs in new.values():
            check_amounts(needs.role, needs.resources)
        check_resources(bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        for role, group in self._place(bundles).items():
            placed = _Role(group, {}, role == "trainer")
            for unit, index in zip(units[role], _by_node(group, len(bundles[role])), strict=True):
                placed.workers.update(dict.fromkeys(unit, index))
            self._roles.append(placed)
        self._requirements.update(new)
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
            _remove(role.group for role in self._roles)
        self._roles, self._requirements = [], {}

    def _place(self, bundles: Mapping[str, Sequence[Resources]]) -> dict[str, PlacementGroup]:
        """Set aside what all roles need; what a part of them has got is let go of again until all have it.

        Two runs that each held a part would wait for each other.
        """
        end_s, is_said, rng = time.monotonic() + self._timeout_s, False, random.SystemRandom()
        while True:
            groups = {role: _request(role, of_role) for role, of_role in bundles.items()}
            hold_s = time.monotonic() + rng.uniform(1, 2) * _HOLD_S  # two runs are not to let go at the same time
            try:
                while missing := [role for role, group in groups.items() if not _is_created(group)]:
                    now_s = time.monotonic()
                    if now_s > end_s:
                        raise _no_room(f"the {_plural(missing[0])}", self._timeout_s, "pending")
                    if now_s > hold_s and not is_said:
                        is_said = True
                        log.info(
                            f"The {_plural(missing[0])} wait for resources that others use: of the cluster's, "
                            f"{_said(ray.available_resources())} are free."
                        )
                    if now_s > hold_s and len(missing) < len(groups):
                        break
                    time.sleep(_POLL_S)
                else:
                    return groups
            except BaseException:
                _remove(groups.values())
                raise
            _remove(groups.values())
            time.sleep(rng.uniform(0, 1) * _HOLD_S)

    def _await(self, group: PlacementGroup, who: str, timeout_s: float, bundle: int) -> None:
        """Wait until a bundle of a group is on a host that lives."""
        end_s = time.monotonic() + timeout_s
        while not _is_placed(table := placement_group_table(group), bundle):
            if time.monotonic() > end_s:
                raise _no_room(who, timeout_s, table["state"].lower())
            time.sleep(_POLL_S)


def _request(role: str, bundles: Sequence[Resources]) -> PlacementGroup:
    """Ask for a group, and do not wait for it."""
    return placement_group([{**_ANY_HOST, **bundle} for bundle in bundles], strategy=_STRATEGIES.get(role, "SPREAD"))


def _remove(groups: Iterable[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def _is_created(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == "CREATED")


def _no_room(who: str, timeout_s: float, state: str) -> NoRoom:
    return NoRoom(
        f"{who} could not be placed on the cluster within {timeout_s:g} s ({state}): "
        f"of its resources, {_said(ray.available_resources())} are free."
    )


def _is_placed(table: Mapping[str, Any], bundle: int) -> bool:
    """Whether a bundle has a host that lives; its group may have lost others than this one."""
    node = table["bundles_to_node_id"].get(bundle)
    return bool(node) and any(entry["Alive"] and entry["NodeID"] == node for entry in ray.nodes())


def check_amounts(role: str, resources: Mapping[str, float]) -> None:
    """Check that amounts are such that Ray takes them; a host's Ray ends itself at a negative one.

    Raises:
        ValueError: one is negative, no number, or above 1 and not whole.
    """
    for name, amount in resources.items():
        if not 0 <= amount < math.inf or (amount > 1 and amount != int(amount)):
            raise ValueError(
                f"`{role}_resources` asks for {name} {amount:g}: an amount must be at least 0, and a whole number if "
                "it is above 1."
            )


def check_resources(bundles: Mapping[str, Sequence[Resources]], hosts: Sequence[Resources]) -> None:
    """Check that a cluster has what is asked for.

    Args:
        bundles: what is needed on one host each, by role.
        hosts: what each has.

    Raises:
        ValueError: one of them, or all of them together, have less, or what there is lies on too many hosts.
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
    for role, of_role in bundles.items():
        if of_role[0] and all(bundle == of_role[0] for bundle in of_role):
            num_that_fit = sum(_times(of_role[0], host) for host in hosts)
            if num_that_fit < len(of_role):
                raise ValueError(
                    f"{len(of_role)} {_plural(role)} need {_said(of_role[0])} on one host each, and the hosts of the "
                    f"cluster have room for {num_that_fit} of them: in all it has {_said(total)}."
                )


def _times(bundle: Resources, host: Resources) -> int:
    """Count how often a host has what a bundle needs."""
    return min(int(host.get(name, 0) / amount + 1e-6) for name, amount in bundle.items())


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
