"""The form in which a worker computes."""

from __future__ import annotations

import cloudpickle
from torch import nn

from digenrl.algorithms import FlowGRPO
from digenrl.strategies.workers import Worker, WorkerSettings
from tests.strategies.workers_at_hand import LocalStore
from tests.toy import ToyPolicy, level_reward


class Forgetful(ToyPolicy):
    def build(self) -> None:
        super().build()
        self.dropout = nn.Dropout(0.5)


def test_a_worker_keeps_what_a_policy_builds_in_evaluation_mode() -> None:
    worker = Worker(LocalStore())
    worker.build(cloudpickle.dumps(FlowGRPO(Forgetful(), level_reward)), WorkerSettings(), trains=True)
    assert [name for name, part in worker._module.policy.named_modules() if part.training] == []
