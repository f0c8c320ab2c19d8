"""`digenrl plan`: the strategy's settings for a number of devices, found by simulating what a run has measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from digenrl.cli.arguments import read_arguments
from digenrl.cli.errors import UsageError, suggest
from digenrl.cli.settings import take_flags
from digenrl.scheduling import SchedulingPolicy
from digenrl.scheduling.profile import Profile, TimestepBatchSize
from digenrl.scheduling.simulate import (
    Cluster,
    Workload,
    divisors,
    fluid_bound_s,
    simulate,
    simulate_colocated,
)

HELP = """\
usage: digenrl plan --devices N --profile FILE [--prompts-per-step N] [--group-size G] [--max-staleness FRACTION]

Find the split of devices into generators and trainers, and the strategy's other settings, that make steps shortest.
Costs come from `profile.json`, which `digenrl fit` writes to its run folder; every candidate is simulated with the real
scheduler. Prints YAML for `trainer.strategy`; behind each setting stands what it gains.

options:
  --devices N               devices for generators and trainers together, at least 2
  --profile FILE            what a run has measured
  --prompts-per-step N      prompts of a step (default: as in the run)
  --group-size G            samples per prompt (default: as in the run)
  --max-staleness FRACTION  largest stale fraction of a step that you accept, in [0, 1) (default: 0.25)
  -h, --help                show this
"""

_FLAGS = ("devices", "profile", "prompts_per_step", "group_size", "max_staleness")
_NUM_STEPS = 5  # simulated; the first one is left out, as it measures assistance and has no work made ahead
_MAX_SPLITS = 24  # simulated at first; around the best ones all are
_NUM_BEST = 3  # splits that are tried with all sizes of micro-batches
_SHORTEST_SWITCH_S = 0.001  # less is what it takes to find that there is nothing to switch
_WORTH_IT = 0.01  # share of a step's time that a mechanism must save to be switched on


@dataclass(frozen=True)
class Settings:
    """A candidate."""

    generators: int
    trainers: int
    groups_per_micro_batch: int
    timestep_batch_size: TimestepBatchSize | None
    trainer_assist: str
    staleness: float


class Planner:
    """Finds the settings with the shortest step."""

    def __init__(self, profile: Profile, workload: Workload, *, devices: int, max_staleness: float) -> None:
        """Plan for `devices` devices.

        Args:
            profile: gives the update costs by numbers of timesteps at a time.
            workload: a step, and all other costs.
            devices: generators and trainers together.
            max_staleness: largest stale fraction of a step to consider.
        """
        self._workload = workload
        self._devices = devices
        self._max_staleness = max_staleness
        self._update_s = {size: cost * profile.trainers for size, cost in profile.update_costs.items()}
        self._step_s: dict[Settings, float] = {}

    def step_s(self, settings: Settings) -> float:
        """Give the seconds of a step, by simulation."""
        if settings not in self._step_s:
            result = simulate(
                Cluster(settings.generators, settings.trainers),
                self.workload(settings),
                SchedulingPolicy(settings.trainer_assist, settings.staleness),
                num_steps=_NUM_STEPS,
                record_spans=False,
            )
            self._step_s[settings] = sum(result.step_s[1:]) / (_NUM_STEPS - 1)
        return self._step_s[settings]

    def workload(self, settings: Settings) -> Workload:
        """Give the work of a step under these settings."""
        return dataclasses.replace(
            self._workload,
            update_s=self._update_s[settings.timestep_batch_size],
            groups_per_micro_batch=settings.groups_per_micro_batch,
        )

    def colocated_step_s(self, settings: Settings) -> float:
        """Give the seconds of a step where all devices do everything."""
        cluster = Cluster(settings.generators, settings.trainers)
        return simulate_colocated(cluster, self.workload(settings), num_steps=1, record_spans=False).mean_step_s

    def bound_s(self, settings: Settings) -> float:
        """Give the least seconds of a step, in the long run, on the split of these settings."""
        cluster, workload = Cluster(settings.generators, settings.trainers), self.workload(settings)
        num_steps = 1000
        return fluid_bound_s(cluster, workload, num_steps=num_steps) / num_steps

    def best(self) -> Settings:
        """Search: first the split with small micro-batches, then their size, then what is worth its price."""
        size = min(self._update_s, key=lambda size: (self._update_s[size], str(size)))
        coarse = [self._finest(trainers, size) for trainers in self._trainer_counts()]
        ranked = sorted((candidate for candidate in coarse if candidate is not None), key=self.step_s)
        near = {candidate.trainers for candidate in ranked[:_NUM_BEST]}
        stride = self._stride
        trainers = sorted({count + shift for count in near for shift in range(1 - stride, stride)})
        found = [self._finest(count, size) for count in trainers if 0 < count < self._devices]
        splits = sorted((candidate for candidate in found if candidate is not None), key=self.step_s)[:_NUM_BEST]
        best = min((other for split in splits for other in self._sizes(split)), key=self.step_s)
        for cheaper in ({"staleness": 0.0}, {"trainer_assist": "off"}):
            other = dataclasses.replace(best, **cheaper)
            if self.step_s(other) <= self.step_s(best) * (1 + _WORTH_IT):
                best = other
        return best

    def alternatives(self, best: Settings) -> Iterator[tuple[str, str, Settings]]:
        """Give what each setting would be otherwise: its name, the other value, and all settings with that value."""
        even = dataclasses.replace(best, generators=self._devices - self._devices // 2, trainers=self._devices // 2)
        if even.trainers != best.trainers and self._fits(even):
            yield "generators", f"{even.generators} + {even.trainers}", even
        if best.groups_per_micro_batch != self._workload.num_groups:
            whole = dataclasses.replace(best, groups_per_micro_batch=self._workload.num_groups)
            yield "groups_per_micro_batch", "all", whole
        dearest = max(self._update_s, key=lambda size: (self._update_s[size], str(size)))
        if dearest != best.timestep_batch_size and None not in (dearest, best.timestep_batch_size):
            other = dataclasses.replace(best, timestep_batch_size=dearest)
            yield "timestep_batch_size", str(dearest), other
        if best.trainer_assist != "off":
            yield "trainer_assist", "off", dataclasses.replace(best, trainer_assist="off")
        if best.staleness > 0:
            yield "staleness", "0", dataclasses.replace(best, staleness=0.0)

    @property
    def _stride(self) -> int:
        return math.ceil((self._devices - 1) / _MAX_SPLITS)

    def _trainer_counts(self) -> range:
        return range(1, self._devices, self._stride)

    def _finest(self, trainers: int, size: TimestepBatchSize | None) -> Settings | None:
        """Give a split's candidate with the smallest micro-batches that all trainers get a share of."""
        for groups in divisors(self._workload.num_groups):
            found = Settings(self._devices - trainers, trainers, groups, size, "optimal", self._max_staleness)
            if self._fits(found):
                return found
        return None

    def _fits(self, settings: Settings) -> bool:
        return settings.groups_per_micro_batch * self._workload.group_size >= settings.trainers

    def _sizes(self, settings: Settings) -> Iterator[Settings]:
        for groups in divisors(self._workload.num_groups):
            candidate = dataclasses.replace(settings, groups_per_micro_batch=groups)
            if self._fits(candidate):
                yield candidate


def run(words: Sequence[str]) -> int:
    """Search, and print the best settings; returns the exit code.

    Raises:
        UsageError: wrong input.
    """
    arguments = read_arguments(words)
    if arguments.show_help:
        print(HELP, end="")
        return 0
    if arguments.files:
        raise UsageError("`--config` is not an option of `digenrl plan`; costs come from `--profile FILE`.")
    flags = take_flags(arguments, _FLAGS, "plan")
    for option in arguments.options:
        known = [f"--{name.replace('_', '-')}" for name in _FLAGS]
        raise UsageError(f"`{option.name}` is not an option of `digenrl plan`{suggest(option.name, known)}")
    for name, meaning in (("devices", "N"), ("profile", "FILE")):
        if name not in flags:
            raise UsageError(f"`--{name} {meaning}` is missing.")
    devices = _count("devices", flags["devices"], least=2)
    max_staleness = _staleness(flags.get("max_staleness", "0.25"))
    try:
        profile = Profile.read(flags["profile"])
    except ValueError as error:
        raise UsageError(f"`--profile`: {error}") from error
    workload = profile.workload()
    given = {
        field: _count(flag, flags[flag], least=1)
        for field, flag in (("num_groups", "prompts_per_step"), ("group_size", "group_size"))
        if flag in flags
    }
    workload = dataclasses.replace(workload, **given)
    planner = Planner(profile, workload, devices=devices, max_staleness=max_staleness)
    print("\n".join(_report(planner, planner.best(), workload, profile)))
    return 0


def _report(planner: Planner, best: Settings, workload: Workload, profile: Profile) -> Iterator[str]:
    """Write the settings as YAML, and what is predicted of them as its comments."""
    step_s = planner.step_s(best)
    gains = {
        name: f"{planner.step_s(other) / step_s:.2f}x as fast as with {value}"
        for name, value, other in planner.alternatives(best)
    }
    num_devices, ratio = best.generators + best.trainers, planner.colocated_step_s(best) / step_s
    yield f"# {num_devices} devices, {workload.num_groups} prompts of {workload.group_size} samples a step. Predicted:"
    yield f"# {step_s:.4g} s a step, {workload.num_samples / step_s:.4g} samples/s;"
    yield f"# {planner.bound_s(best) / step_s:.0%} of the fluid bound, the best possible time on this split;"
    yield f"# {ratio:.2f}x as fast as a colocated run on the same devices."
    if profile.assist_s is None and best.trainer_assist != "off":
        yield "# The run did not measure assistance: trainers are taken to generate as fast as generators."
    if workload.switch_s >= _SHORTEST_SWITCH_S and best.trainer_assist != "off":
        yield f"# A switch of the trainers counts {workload.switch_s:.3g} s, as measured; keep `assist_switch`."
    if len(profile.update_costs) == 1:
        yield "# The run measured one `timestep_batch_size` only, and it is kept."
    yield "trainer:"
    yield "  strategy:"
    yield "    class_path: DisaggregatedStrategy"
    yield "    init_args:"
    for field in dataclasses.fields(best):
        value = getattr(best, field.name)
        if value is None:
            continue
        if field.name == "groups_per_micro_batch" and value == workload.num_groups:
            value = "all"
        text = f"      {field.name}: {_yaml(value)}"
        yield f"{text:<38}  # {gains[field.name]}" if field.name in gains else text


def _yaml(value: object) -> str:
    return '"off"' if value == "off" else f"{value:g}" if isinstance(value, float) else str(value)


def _count(name: str, text: str, *, least: int) -> int:
    flag = name.replace("_", "-")
    if not isinstance(text, str) or not text.lstrip("-").isdecimal():
        raise UsageError(f"`--{flag}` must be a whole number, got {text!r}.")
    if int(text) < least:
        raise UsageError(f"`--{flag}` is a count and must be at least {least}, got {text}.")
    return int(text)


def _staleness(text: str) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError) as error:
        raise UsageError(f"`--max-staleness` must be a number, got {text!r}.") from error
    if not 0 <= value < 1:
        raise UsageError(
            f"`--max-staleness` is the largest stale fraction of a step and must be in [0, 1), got {text}."
        )
    return value
