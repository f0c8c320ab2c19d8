"""What the ranks of a group are told of each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from digenrl.strategies.rendezvous import Rendezvous

ENGINE: Any = SimpleNamespace(driver_address="127.0.0.1", task_timeout_s=5.0, host=lambda worker: worker[-1])


def test_each_rank_knows_its_place_and_the_hosts_of_all() -> None:
    groups = Rendezvous(ENGINE).make_groups("trainers", ["trainer-0", "trainer-1"])
    assert [group.rank for group in groups] == [0, 1]
    assert {group.hosts for group in groups} == {("0", "1")}
    assert {(group.name, group.address, group.timeout_s) for group in groups} == {("trainers-1", "127.0.0.1", 5.0)}
    assert groups[0].port == groups[1].port > 0


def test_a_group_that_is_started_again_meets_under_another_name_at_the_same_store() -> None:
    rendezvous = Rendezvous(ENGINE)
    first, second = (rendezvous.make_groups("trainers", ["trainer-0", "trainer-1"])[0] for _ in range(2))
    assert (first.name, second.name) == ("trainers-1", "trainers-2")
    assert first.port == second.port


def test_one_rank_needs_no_store() -> None:
    assert Rendezvous(ENGINE).make_groups("trainers", ["trainer-0"])[0].port == 0
