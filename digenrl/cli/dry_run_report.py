"""What a dry run prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from digenrl.cli.estimates import GIB, PolicyCalls
from digenrl.policies import PipelinePolicy
from digenrl.scheduling.simulate import SimulatedSpan, SimulationResult
from digenrl.strategies.memory_estimate import total_bytes

if TYPE_CHECKING:
    from digenrl.cli.dry_run import DryRun

_MIN_WIDTH = 120  # where the output is not a terminal
_MAX_SIGMAS = 12  # that are printed one by one
_BAR = 72  # characters of the timeline
_MARKS = {"generate": "g", "score": "s", "update": "u", "assist": "a", "optimizer": "o", "sync": "~", "switch": "x"}


def report(found: DryRun) -> None:
    """Print what was found."""
    console = Console()
    if console.width < _MIN_WIDTH and not console.is_terminal:
        console = Console(width=_MIN_WIDTH)
    policy = type(found.module.policy).__name__
    console.print(
        f"{type(found.module).__name__} of {policy}: {_count(found.strategy.generators, 'generator')} + "
        f"{_count(found.strategy.trainers, 'trainer')}; a dry run, nothing was started",
        style="bold",
        highlight=False,
    )
    for table in (_parameters(found), _memory(found)):
        console.print(table)
    for line in (*_micro_batches(found), *_schedule(found), *_times(found)):
        console.print(line, highlight=False, markup=False)
    for note in (*_memory_notes(found), *found.notes):
        console.print(f"- {note}", style="dim", highlight=False, markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="none", pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _parameters(found: DryRun) -> Table:
    table = _table("parameters", "all", "trained", "dtype")
    for name, count, trained, dtype in found.parts:
        table.add_row(name, f"{count:,}", f"{trained:,}", dtype)
    table.add_section()
    num_all, num_trained = sum(part[1] for part in found.parts), sum(part[2] for part in found.parts)
    table.add_row("policy", f"{num_all:,}", f"{num_trained:,}", "")
    return table


def _memory(found: DryRun) -> Table:
    largest = max(total_bytes(parts) for parts in (found.generator, found.trainer))
    unit, name = (GIB, "GiB") if largest > 0.1 * GIB else (1024**2, "MiB")
    table = _table(f"{name} per device", "generator", "trainer")
    sides = [{part.name: part.num_bytes for part in parts} for parts in (found.generator, found.trainer)]
    for name in dict.fromkeys(name for side in sides for name in side):
        table.add_row(name, *(_digits(side[name] / unit) if name in side else "" for side in sides))
    table.add_section()
    table.add_row("in all", *(_digits(total_bytes(parts) / unit) for parts in (found.generator, found.trainer)))
    memory_bytes = found.device.memory_bytes
    shares = (total_bytes(parts) / memory_bytes for parts in (found.generator, found.trainer))
    table.add_row(
        f"of the {memory_bytes / GIB:.0f} GiB of a {found.device.name}", *(f"{share:.0%}" for share in shares)
    )
    return table


def _micro_batches(found: DryRun) -> Iterator[str]:
    shape, calls = found.shape, PolicyCalls.of(found.module)
    first = shape.micro_batches[0]
    sizes = Counter(len(part) for part in first.slices)
    slices = " and ".join(f"{count} of {size}" for size, count in sorted(sizes.items(), reverse=True))
    yield (
        f"A step: {_count(shape.num_groups, 'group')} of {shape.group_size} samples in "
        f"{_count(len(shape.micro_batches), 'micro-batch')} of {len(first)}."
    )
    yield f"A micro-batch: made in slices, {slices} samples; {calls.num_steps} denoising steps each."
    rows = shape.trainer_samples * shape.timesteps_at_once * calls.trained_rows
    chosen = " (what is estimated to fit)" if shape.is_auto else ""
    guided = ", each row twice for guidance" if calls.trained_rows > 1 else ""
    yield (
        f"Trained: {_count(shape.trainer_samples, 'sample')} a trainer at {_count(shape.num_timesteps, 'timestep')}, "
        f"{shape.timesteps_at_once} at a time{chosen}: {_count(rows, 'row')} in a forward and backward{guided}."
    )


def _schedule(found: DryRun) -> Iterator[str]:
    """Say at which noise levels the policy of a pipeline is asked in rollouts and trained."""
    policy = found.module.policy
    if not isinstance(policy, PipelinePolicy):
        return
    sigmas = [f"{sigma:.3f}" for sigma in policy.sigmas(found.module.num_steps).tolist()]
    shown = sigmas if len(sigmas) <= _MAX_SIGMAS else [*sigmas[:3], "...", *sigmas[-3:]]
    name = policy.schedule if isinstance(policy.schedule, str) else "list"
    shift = "" if policy.schedule_shift is None else f", shift {policy.schedule_shift:g}"
    yield f"Sigmas of a rollout: {', '.join(shown)} (`schedule` {name}{shift})."


def _times(found: DryRun) -> Iterator[str]:
    result, workload = found.result, found.workload
    if result is None or workload is None:
        return
    later = result.step_s[1:]
    step_s = sum(later) / len(later)
    yield ""
    yield (
        f"Predicted: {step_s:.4g} s a step, {workload.num_samples / step_s:.4g} samples/s "
        f"({workload.generate_s:.4g} s to make a sample, {workload.update_s:.4g} s to train one, on one worker)."
    )
    shares = ", ".join(f"{group} {share:.0%}" for group, share in result.utilization.items())
    yield f"Busy: {shares}; bubbles {result.bubble_share:.0%}, {result.efficiency:.0%} of the fluid bound."
    assisted = result.num_assisted[-1]
    if assisted:
        yield f"Trainers make {assisted} of {len(found.shape.micro_batches)} micro-batches themselves."
    yield from _timeline(result)


def _timeline(result: SimulationResult) -> Iterator[str]:
    """Draw the last step but one: a line per worker, trainers as one, and the marks' meaning."""
    begin_s = sum(result.step_s[:-2])
    end_s = begin_s + result.step_s[-2]
    rows: dict[str, list[SimulatedSpan]] = {name: [] for name in result.workers}
    for span in result.spans:
        rows[span.worker].append(span)
    trainers = [name for name in rows if name.startswith("trainer-")]
    width = max(len(name) for name in rows)
    yield f"{'':<{width}}  step {len(result.step_s) - 1}, {end_s - begin_s:.4g} s"
    for name, spans in rows.items():
        if name in trainers[1:]:
            continue
        label = "trainers" if name in trainers and len(trainers) > 1 else name
        yield f"{label:<{width}}  {_bar(spans, begin_s, end_s)}"
    yield f"{'':<{width}}  g makes samples, u trains, a trainers make samples, ~ moves weights, . waits"


def _bar(spans: Sequence[SimulatedSpan], begin_s: float, end_s: float) -> str:
    """Give each stretch of time the mark of what takes the middle of it."""
    unit_s = (end_s - begin_s) / _BAR
    marks = []
    for index in range(_BAR):
        at_s = begin_s + (index + 0.5) * unit_s
        task = next((span.task for span in spans if span.start_s <= at_s < span.end_s), None)
        marks.append("." if task is None else _MARKS.get(task, "?"))
    return "".join(marks)


def _memory_notes(found: DryRun) -> Iterator[str]:
    strategy = found.strategy
    yield (
        "Memory leaves out the text encoders while prompts are encoded, the VAE, rewards, and what libraries and the "
        "allocator's fragments take. Activations are those of the largest forward, traced on tensors without memory; "
        "generators hold those of one block at a time."
    )
    if strategy.sharding == "hybrid":
        yield "With `sharding` hybrid, eight trainers are taken to be on a host."
    for role, parts in (("generator", found.generator), ("trainer", found.trainer)):
        if total_bytes(parts) > found.device.memory_bytes:
            yield f"A {role} does not fit: {_remedy(role, found)}."


def _remedy(role: str, found: DryRun) -> str:
    strategy = found.strategy
    if role == "generator":
        return "raise `devices_per_generator`, or set `generation_batch_size`"
    remedies = {
        "set `gradient_checkpointing`": not strategy.gradient_checkpointing,
        "set `sharding: fsdp`": strategy.sharding == "none" and strategy.trainers > 1,
        "set `grad_sync: micro_batch`": strategy.sharding != "none" and strategy.grad_sync == "step",
        "set `offload_optimizer`": not strategy.offload_optimizer,
        "lower `timestep_batch_size`": found.shape.timesteps_at_once > 1,
        "train an adapter (`lora_rank`)": True,
    }
    return ", or ".join(remedy for remedy, helps in remedies.items() if helps)


def _count(number: int, name: str) -> str:
    plural = "es" if name.endswith("ch") else "s"
    return f"{number} {name}{'' if number == 1 else plural}"


def _digits(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
