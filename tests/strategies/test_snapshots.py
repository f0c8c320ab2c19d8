"""The journal: which windows a snapshot covers, and which trajectories may go then."""

from __future__ import annotations

from digenrl.engines import ObjectRef
from digenrl.strategies.snapshots import Journal, StepCall, snapshot_interval

STEP = StepCall([], 0.0, "norm", 1.0, 1.0)


def ref(name: str) -> ObjectRef:
    return ObjectRef("generator-0", name, 0)


def test_the_forms_of_an_interval() -> None:
    assert [snapshot_interval(text) for text in ("every_step", "every_1", "every_25", "off")] == [1, 1, 25, None]


def test_a_snapshot_covers_the_windows_up_to_its_version_and_no_later_one() -> None:
    journal = Journal(version=7)
    for name in "abc":
        journal.keep([ref(name)])
        journal.close(STEP)
    journal.keep([ref("d")])
    assert journal.version == 10
    assert journal.commit(9) == [ref("a"), ref("b")]
    assert [window.trajectories for window in journal.closed] == [[ref("c")]]
    assert journal.commit(9) == []
    assert journal.commit(10) == [ref("c")]
    assert journal.open.trajectories == [ref("d")]


def test_other_weights_leave_nothing_to_repeat() -> None:
    journal = Journal()
    journal.keep([ref("a")])
    journal.close(STEP)
    journal.keep([ref("b")])
    assert journal.begin_anew(30) == [ref("a"), ref("b")]
    assert (journal.version, journal.closed, journal.open.updates) == (30, [], [])


def test_a_step_of_which_no_row_is_left_is_empty() -> None:
    assert StepCall([], 0.0, "norm", 1.0, 0.0).is_empty
    assert not STEP.is_empty
