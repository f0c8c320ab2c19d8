"""What runs in a worker: a copy of the module, and the tasks that the driver calls."""

from __future__ import annotations

from datetime import timedelta

import cloudpickle
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from digenrl.strategies.skeleton import describe
from digenrl.strategies.weight_planes import weights_digest
from digenrl.strategies.workers.generating import Generating
from digenrl.strategies.workers.reports import BuildReport
from digenrl.strategies.workers.settings import RankGroup, WorkerSettings
from digenrl.strategies.workers.state import State
from digenrl.strategies.workers.weights import Weights


class Worker(Generating, State, Weights):
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
        built.configure_model()
        built.to(self._device)
        if trains:
            built._row_group = self._group
        # A worker has no trainer, and Lightning's `log` would drop the value.
        built.log, built.log_dict = self._log, self._log_dict
        built._is_reward_set_up = False  # whatever the module did before it was sent here
        if sets_up_reward:
            built.set_up_reward()
        published = built.published_weights()
        frozen = {name: tensor for name, tensor in built.state_dict().items() if name not in published}
        return BuildReport(describe(built), weights_digest(frozen.items()))
