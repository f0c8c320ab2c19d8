"""What runs in a worker: a copy of the module, and the tasks that the driver calls."""

from __future__ import annotations

from datetime import timedelta

import cloudpickle
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from digenrl.policies import DiffusionPolicy
from digenrl.policies.stored_weights import load_stored_weights
from digenrl.strategies.blocks import apply_block_options
from digenrl.strategies.sharding import check_hosts, make_mesh, shard_policy
from digenrl.strategies.skeleton import describe
from digenrl.strategies.workers.generating import Generating
from digenrl.strategies.workers.parity import Parity
from digenrl.strategies.workers.reports import BuildReport
from digenrl.strategies.workers.settings import RankGroup, WorkerSettings
from digenrl.strategies.workers.snapshot import Snapshots
from digenrl.strategies.workers.state import State


class Worker(Generating, State, Snapshots, Parity):
    """One worker's tasks. Generators and trainers run the same class: an assisting trainer generates, too.

    Lifecycle: `join_group` where several ranks compute together, `build`, then, for trainers, `configure_optimizer`.
    """

    def join_group(self, group: RankGroup, settings: WorkerSettings) -> None:
        """Meet the other ranks; before `build`, so that each rank builds its share only."""
        self._rank, self._num_ranks = group.rank, group.size
        self._hosts = group.hosts
        if group.size == 1:
            return
        timeout = timedelta(seconds=group.timeout_s)
        store = PrefixStore(group.name, TCPStore(group.address, group.port, is_master=False, timeout=timeout))
        backend = "nccl" if settings.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=timeout)
        self._group = dist.group.WORLD

    def build(
        self, module: bytes, settings: WorkerSettings, *, trains: bool = False, sets_up_reward: bool = False
    ) -> BuildReport:
        """Unpickle the module and build its policy on the device; whoever is to score gets its reward ready, too."""
        self._settings, self._trains = settings, trains
        self._module = built = cloudpickle.loads(module)
        built._place_policy = self._place_policy
        built.configure_model()
        built.to(self._device)
        if trains:
            built._row_group = self._group
        # A worker has no trainer, and Lightning's `log` would drop the value.
        built.log, built.log_dict = self._log, self._log_dict
        built._is_reward_set_up = False  # whatever the module did before it was sent here
        if sets_up_reward:
            built.set_up_reward()
        return BuildReport(describe(built), self.frozen_digest())

    def _place_policy(self, policy: DiffusionPolicy) -> None:
        """Bring a policy that was just built into the form in which this worker computes, and read its weights."""
        apply_block_options(policy, self._settings)
        if self._is_sharded:
            sharding = self._settings.sharding if self._trains else "fsdp"
            check_hosts(sharding, self._hosts)
            grad_sync = self._settings.grad_sync if self._trains else "step"
            mesh = make_mesh(self._settings.device, sharding, self._hosts)
            shard_policy(policy, mesh, grad_sync=grad_sync)
        load_stored_weights(policy, self._device)
