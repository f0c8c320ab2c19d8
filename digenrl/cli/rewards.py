"""`digenrl rewards`: which rewards there are, and what one gives for files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from digenrl.cli.arguments import read_flags
from digenrl.cli.devices import read_device
from digenrl.cli.errors import UsageError, one_line, show, suggest
from digenrl.cli.media_files import read_image, read_video
from digenrl.cli.quiet import own_log
from digenrl.cli.reward_classes import RewardInfo, as_dict, reward_classes
from digenrl.rewards import (
    ErrorPolicy,
    JoinedReward,
    Reward,
    RewardError,
    RewardTraits,
    check_prompts,
    reward_name,
    score_samples,
    set_up_reward,
)
from digenrl.rewards.reward import shortened
from digenrl.types import Prompt, PromptBatch

_COMMANDS = {"list": "show what there is", "try": "score files"}
_TRY_FLAGS = ("image", "video", "prompt", "metadata", "device", "format")
_LEAST_TEXT_WIDTH = 30  # beside names; terminals break the lines where there is less

HELP = """\
usage: digenrl rewards list [--format table|json]
       digenrl rewards try --reward NAME [--reward.SETTING VALUE]... --prompt TEXT --image FILE [--image FILE]...

Show the rewards of this package, or score files with one of them or with one of your own, as a run would.

  digenrl rewards list
  digenrl rewards try --reward OCRReward --image a.png --prompt '"42"'
  digenrl rewards try --reward my_rewards.brightness --video frames/ --prompt 'a sunrise' --format json

options of `try`:
  --reward NAME             a class of the list, or the dotted path of a class or function of your own
  --reward.SETTING VALUE    what its constructor takes
  -c, --config FILE         YAML with the same under `reward:`, as in a run's configuration; options win over it
  --image FILE              an image, of any mode and size; may be given several times
  --video PATH              a folder with the frames of a video, or an animated image; may be given several times
  --prompt TEXT             once for all files, or once for each; files of one prompt are one group
  --metadata JSON           columns that the reward needs, '{"name": value}', once for all files or once for each
  --device NAME             cpu, cuda, ... (default: cpu)

options of both:
  --format table|json       what to print (default: table)
  -h, --help                show this
"""


@dataclass(frozen=True)
class Sample:
    """A file and what it was to show."""

    path: str
    media: Tensor  # [C, H, W], or [F, C, H, W] of a video
    prompt: Prompt


def run(words: Sequence[str]) -> int:
    """List rewards or try one; returns the exit code: 1 where the reward fails.

    Raises:
        UsageError: wrong input.
    """
    if not words or "--help" in words or "-h" in words:
        print(HELP, end="")
        print(*_settings_of_reward(words), sep="\n", end="")
        return 0
    command, rest = words[0], words[1:]
    if command not in _COMMANDS:
        raise UsageError(f"`digenrl rewards {command}` is not a command{suggest(command, _COMMANDS)}")
    if command == "list":
        _list(rest)
        return 0
    with own_log():
        try:
            _try(rest)
        except RewardError as error:
            if _wants_traceback():
                traceback.print_exc()
            print(f"error: {one_line(error)}", file=sys.stderr)
            return 1
    return 0


def _settings_of_reward(words: Sequence[str]) -> list[str]:
    if not any(word.startswith(("--reward", "--config", "-c")) for word in words):
        return []
    from digenrl.cli.reward_argument import reward_usage  # this one needs Lightning

    return [*reward_usage([word for word in words if word not in ("-h", "--help")]), ""]


def _list(words: Sequence[str]) -> None:
    form = _format(read_flags(words, ("format",), "digenrl rewards list"))
    infos = [RewardInfo.of(name, reward) for name, reward in reward_classes().items()]
    if form == "json":
        print(json.dumps([as_dict(info) for info in infos], indent=2))
        return
    indent = max(len(info.name) for info in infos) + 2
    print("\n".join(line for info in infos for line in _entry(info, indent)))


def _try(words: Sequence[str]) -> None:
    from digenrl.cli.reward_argument import make_reward  # this one needs Lightning

    reward, rest = make_reward(words)
    flags = read_flags(rest, _TRY_FLAGS, "digenrl rewards try")
    form, device = _format(flags), read_device(_only("device", flags, "cpu"))
    samples = _samples(flags)
    _check(reward, samples)
    set_up_reward(reward, device)
    rewards = score_files(reward, samples, device)
    if form == "json":
        print(json.dumps(_records(reward, samples, rewards), indent=2, ensure_ascii=False))
        return
    names = _names(reward)
    _print_table(
        [
            ["file", *(["reward"] if len(names) == 1 else names)],
            *(
                [sample.path, *(f"{value:.6g}" for value in values)]
                for sample, values in zip(samples, rewards.tolist(), strict=True)
            ),
        ]
    )


def score_files(reward: Reward, samples: Sequence[Sample], device: torch.device) -> Tensor:
    """Ask a reward about files, those of one size together: [B, R], R = 1 of a single one.

    Raises:
        RewardError: it has failed; the message names the file.
    """
    prompts = _prompt_batch([sample.prompt for sample in samples])
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for row, sample in enumerate(samples):
        by_shape.setdefault(tuple(sample.media.shape), []).append(row)
    if RewardTraits.of(reward).groupwise and len(by_shape) > 1:
        raise UsageError("files must be of one size: the reward compares them with each other.")
    rewards = torch.empty(len(samples), len(_names(reward)))
    # Dropped groups are named by their file below; the traceback of what was raised is kept by "raise" alone.
    policy = ErrorPolicy(on_error="raise") if _wants_traceback() else ErrorPolicy(on_error="drop_group", num_retries=0)
    for rows in by_shape.values():
        media = torch.stack([samples[row].media for row in rows]).to(device)
        with torch.no_grad():
            batch = score_samples(reward, media, prompts.select(rows), policy)
        if batch.failures:
            first = batch.failures[0]
            others = {rows[failure.row] for failure in batch.failures}
            more = f" and {len(others) - 1} more of {len(samples)}" if len(others) > 1 else ""
            raise RewardError(
                f"reward `{first.reward}` for file `{samples[rows[first.row]].path}`{more}, prompt "
                f"{shortened(first.prompt)}, {first.reason}."
            )
        rewards[rows] = batch.rewards.reshape(len(rows), -1)
    return rewards


def _samples(flags: Mapping[str, list[str]]) -> list[Sample]:
    media = [(path, read_image(path)) for path in flags.get("image", [])]
    media += [(path, read_video(path)) for path in flags.get("video", [])]
    if not media:
        raise UsageError("`--image FILE` or `--video PATH` is missing: what is to be scored.")
    if "prompt" not in flags:
        raise UsageError("`--prompt TEXT` is missing: what the files were to show.")
    texts = _one_each("prompt", flags["prompt"], len(media))
    columns = _one_each("metadata", [_metadata(text) for text in flags.get("metadata", ["{}"])], len(media))
    uids: dict[str, int] = {}
    samples = []
    for (path, pixels), text, metadata in zip(media, texts, columns, strict=True):
        uid = uids.setdefault(json.dumps([text, metadata], sort_keys=True), len(uids))
        samples.append(Sample(path, pixels, Prompt(text, uid, metadata=metadata)))
    return samples


def _one_each(name: str, given: list[Any], num_files: int) -> list[Any]:
    if len(given) not in (1, num_files):
        raise UsageError(f"`--{name}` must be given once, or once for each of the {num_files} files, got {len(given)}.")
    return given * num_files if len(given) == 1 else given


def _metadata(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"`--metadata` must be JSON such as '{{\"name\": 1}}', got {show(text)}: {error}.") from error
    if not isinstance(given, dict):
        raise UsageError(f"`--metadata` must be a JSON object such as '{{\"name\": 1}}', got {show(text)}.")
    return given


def _prompt_batch(prompts: Sequence[Prompt]) -> PromptBatch:
    """Put files of one prompt into one group."""
    groups = tuple(prompt.uid for prompt in prompts)
    return PromptBatch(
        prompts=tuple(prompts),
        group_ids=groups,
        sample_indices=tuple(groups[:row].count(group) for row, group in enumerate(groups)),
        seeds=(0,) * len(prompts),
        step=0,
    )


def _check(reward: Reward, samples: Sequence[Sample]) -> None:
    """Check that the prompts have what the reward needs."""
    for column in RewardTraits.of(reward).requires:
        lacking = [sample.path for sample in samples if column not in sample.prompt.metadata]
        if lacking:
            raise UsageError(
                f"`--metadata` must have the column `{column}`, which the reward needs: "
                f"--metadata '{{\"{column}\": ...}}'; `{lacking[0]}` lacks it."
            )
    try:
        check_prompts(reward, [sample.prompt for sample in samples], name="--prompt")
    except ValueError as error:
        raise UsageError(str(error)) from error


def _format(flags: Mapping[str, list[str]]) -> str:
    form = _only("format", flags, "table")
    if form not in ("table", "json"):
        raise UsageError(f"`--format` must be table or json, got `{form}`{suggest(form, ('table', 'json'))}")
    return form


def _only(name: str, flags: Mapping[str, list[str]], default: str) -> str:
    given = flags.get(name, [default])
    if len(given) > 1:
        raise UsageError(f"`--{name}` must be given once, got {', '.join(given)}.")
    return given[0]


def _names(reward: Reward) -> list[str]:
    return list(reward.names) if isinstance(reward, JoinedReward) else [reward_name(reward)]


def _records(reward: Reward, samples: Sequence[Sample], rewards: Tensor) -> list[dict[str, Any]]:
    names = _names(reward)
    return [
        {"file": sample.path, "prompt": sample.prompt.text, "rewards": dict(zip(names, values, strict=True))}
        for sample, values in zip(samples, rewards.tolist(), strict=True)
    ]


def _entry(info: RewardInfo, indent: int) -> list[str]:
    """Describe a reward, its name to the left of lines that begin at `indent`."""
    texts = (
        info.summary,
        f"needs: {info.needs or 'nothing'}",
        f"judges: {', '.join(info.modalities)}; extra: {_extra_of(info)}",
    )
    first, *others = (line for text in texts for line in _wrapped(text, indent))
    return [f"{info.name:<{indent}}{first}", *(" " * indent + line for line in others)]


def _extra_of(info: RewardInfo) -> str:
    if info.extra is None:
        return "none"
    state = {True: "installed", False: "not installed", None: ""}[info.is_installed]
    return f"{info.extra}, {state}" if state else info.extra


def _wrapped(text: str, indent: int) -> list[str]:
    """Wrap a text to a terminal; in a pipe it stays on one line, which can be searched."""
    if not sys.stdout.isatty():
        return [text]
    width = max(shutil.get_terminal_size().columns - indent, _LEAST_TEXT_WIDTH)
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of a text and numbers; what is wider than a terminal goes on in its next line, and nothing is cut."""
    text_width, *number_widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    for text, *numbers in rows:
        padded = (f"{number:>{width}}" for number, width in zip(numbers, number_widths, strict=True))
        print("  ".join([f"{text:<{text_width}}", *padded]))


def _wants_traceback() -> bool:
    return bool(os.environ.get("DIGENRL_TRACEBACK"))
