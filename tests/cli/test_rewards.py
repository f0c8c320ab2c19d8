"""`digenrl rewards`: the list, and rewards of files."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import digenrl.rewards
from digenrl.cli.reward_classes import RewardInfo, is_extra_installed, reward_classes
from tests.cli.commands import Digenrl

TOYS = "tests.cli.toy_rewards"
RED = ["--reward", f"{TOYS}.red"]


@pytest.fixture(autouse=True)
def files(folder: Path) -> None:
    Image.new("RGB", (6, 4), (255, 0, 0)).save(folder / "red.png")
    Image.new("RGB", (6, 4), (51, 255, 255)).save(folder / "cyan.png")
    Image.new("L", (9, 3), 102).save(folder / "grey.png")
    (folder / "text.png").write_text("no image")
    (folder / "frames").mkdir()
    for index in (1, 2, 10):
        Image.new("L", (4, 4), index * 25).save(folder / f"frames/{index}.png")


def tried(digenrl: Digenrl, *words: str) -> list[dict[str, Any]]:
    result = digenrl("rewards", "try", *words, "--format", "json")
    assert (result.code, result.err) == (0, [])
    records = json.loads(result.out)
    assert isinstance(records, list)
    return records


def values(records: list[dict[str, Any]]) -> list[float]:
    return [value for record in records for value in record["rewards"].values()]


# ---- list ------------------------------------------------------------------------------------------------------


def test_list_has_every_public_reward_and_imports_nothing_that_only_one_needs() -> None:
    code = (
        "import sys; from digenrl.cli import main; main(['rewards', 'list', '--format', 'json']); heavy = ("
        "'lightning', 'transformers', 'onnxruntime', 'fastapi'); print([n for n in heavy if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    listed, _, imported = done.stdout.rstrip("\n").rpartition("\n")
    members = [getattr(digenrl.rewards, name) for name in digenrl.rewards.__all__]
    classes = [member for member in members if inspect.isclass(member) and "__call__" in dir(member)]
    callable_objects = {cls.__name__ for cls in classes if any("__call__" in vars(base) for base in cls.__mro__)}
    assert {info["name"] for info in json.loads(listed)} == callable_objects - {"FrameReward"}
    assert imported == "[]"


def test_every_reward_says_what_it_is() -> None:
    for name, reward in reward_classes().items():
        info = RewardInfo.of(name, reward)
        assert info.summary
        assert len(info.summary) <= 120
        assert set(info.modalities) <= {"image", "video"}
        assert info.modalities
        assert info.extra is None or info.is_installed is not None


def said_of(info: RewardInfo) -> tuple[str, str]:
    return info.summary, f"needs: {info.needs or 'nothing'}"


def test_in_a_pipe_each_text_of_the_list_is_one_line(digenrl: Digenrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip("\n") for line in digenrl("rewards", "list").out.splitlines()]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(reward_classes())
    for name, reward in reward_classes().items():
        row = next(row for row, line in enumerate(lines) if line.split()[0] == name)
        info = RewardInfo.of(name, reward)
        assert (lines[row].removeprefix(name).strip(), lines[row + 1].strip()) == said_of(info)
        assert lines[row + 2].strip().startswith(f"judges: {', '.join(info.modalities)}; extra: {info.extra or 'none'}")


@pytest.mark.parametrize("width", [20, 80, 200])
def test_in_a_terminal_the_list_is_wrapped_and_nothing_is_cut(
    digenrl: Digenrl, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = digenrl("rewards", "list").out
    if width >= 80:
        assert max(map(len, out.splitlines())) <= width
    words = " ".join(out.split())
    for name, reward in reward_classes().items():
        assert " ".join([name, *said_of(RewardInfo.of(name, reward))]) in words


def test_rewards_that_ask_others_say_that_they_need_what_those_need() -> None:
    assert RewardInfo.of("SeveralRewards", digenrl.rewards.SeveralRewards).needs == "what its rewards need"


def test_extra_is_installed_if_all_that_it_needs_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {
        "a": ["pillow"],
        "b": ["pillow", "absent-package"],
        "c": ["pillow>=999"],
        "d": ["pillow>=9"],
    }
    required = [f"{package}; extra == '{extra}'" for extra, packages in needed.items() for package in packages]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["torch>=2", *required])
    found = {extra: is_extra_installed(extra) for extra in (*needed, "e")}
    assert found == {"a": True, "b": False, "c": False, "d": True, "e": None}


def test_extras_of_this_package_are_found() -> None:
    assert is_extra_installed("ocr") == (importlib.util.find_spec("rapidocr") is not None)


# ---- try -------------------------------------------------------------------------------------------------------


def test_files_of_any_size_are_scored(digenrl: Digenrl) -> None:
    words = ["--image", "red.png", "--image", "grey.png", "--image=cyan.png", "--prompt", "x"]
    records = tried(digenrl, *RED, *words)
    assert [record["file"] for record in records] == ["red.png", "grey.png", "cyan.png"]
    assert [record["prompt"] for record in records] == ["x"] * 3
    assert values(records) == pytest.approx([1.0, 102 / 255, 51 / 255])


def test_table_shows_the_same_numbers(digenrl: Digenrl) -> None:
    out = digenrl("rewards", "try", *RED, "--image", "red.png", "--image", "grey.png", "--prompt", "x").out
    assert [line.split() for line in out.splitlines() if ".png" in line] == [["red.png", "1"], ["grey.png", "0.4"]]


def test_a_path_is_never_cut(digenrl: Digenrl, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = "/".join(["a" * 60] * 3)
    (folder / path).mkdir(parents=True)
    (folder / "red.png").rename(folder / path / "red.png")
    out = digenrl("rewards", "try", *RED, "--image", f"{path}/red.png", "--prompt", "x").out
    assert out.splitlines()[1].split() == [f"{path}/red.png", "1"]


def test_folder_of_frames_is_one_video_in_natural_order(digenrl: Digenrl) -> None:
    records = tried(digenrl, "--reward", f"{TOYS}.last_frame", "--video", "frames", "--prompt", "x")
    assert values(records) == pytest.approx([250 / 255])


def test_reward_takes_settings_and_stands_in_a_file(digenrl: Digenrl, folder: Path) -> None:
    words = ["--image", "grey.png", "--prompt", "x"]
    bright = ["--reward", "tests.cli.toy_parts.Bright", "--reward.level", "0.1"]
    assert values(tried(digenrl, *bright, *words)) == pytest.approx([-((0.4 - 0.1) ** 2)])
    (folder / "reward.yaml").write_text(
        "reward: {class_path: tests.cli.toy_parts.Bright, init_args: {level: 0.2}}\n", encoding="utf-8"
    )
    assert values(tried(digenrl, "--config", "reward.yaml", *words)) == pytest.approx([-((0.4 - 0.2) ** 2)])
    changed = ["--config", "reward.yaml", "--reward.level", "0.4"]
    assert values(tried(digenrl, *changed, *words)) == pytest.approx([0.0])


def test_each_of_several_rewards_has_a_column(digenrl: Digenrl) -> None:
    several = ["--reward", "SeveralRewards", "--reward.rewards", f"[{TOYS}.red, {{class_path: {TOYS}.prompt_length}}]"]
    records = tried(digenrl, *several, "--image", "red.png", "--prompt", "four")
    assert records[0]["rewards"] == {"red": 1.0, "prompt_length": 4.0}


def test_prompts_and_metadata_are_given_once_or_for_each_file(digenrl: Digenrl) -> None:
    two = ["--image", "red.png", "--image", "cyan.png"]
    prompts = ["--prompt", "[a", "--prompt", '{"b"}']  # text, whatever it looks like
    assert values(tried(digenrl, "--reward", f"{TOYS}.prompt_length", *two, *prompts)) == [2, 5]
    columns = ["--metadata", '{"score": 0.5}', "--metadata", '{"score": 2}']
    assert values(tried(digenrl, "--reward", f"{TOYS}.Column", *two, "--prompt", "x", *columns)) == [0.5, 2]
    assert values(tried(digenrl, "--reward", f"{TOYS}.Column", *two, "--prompt", "x", *columns[:2])) == [0.5, 0.5]


def test_files_of_one_prompt_are_a_group(digenrl: Digenrl) -> None:
    images = ["--image", "red.png", "--image", "cyan.png", "--image", "red.png"]
    prompts = ["--prompt", "a", "--prompt", "b", "--prompt", "a"]
    assert values(tried(digenrl, "--reward", f"{TOYS}.GroupSize", *images, *prompts)) == [2, 1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "`--reward` is missing; `digenrl rewards list` shows what there is."),
        ("--rewrd X", "`--rewrd` is not an option; did you mean `--reward`?"),
        ("--reward SeverlRewards", "`--reward` names no class that is known, `SeverlRewards`; did you mean `SeveralR"),
        ("--reward tests.cli.toy_rewards.rde", "module `tests.cli.toy_rewards` has no `rde`; did you mean `red`?"),
        ("--reward tests.cli.toy_rewards.Shy --reward.wen x", "`--reward.wen` is not a setting of Shy; did you mean"),
        ("--reward tests.cli.toy_rewards.Shy --reward.when x", "--reward.when: `when` must be before or asked"),
        ("--reward tests.cli.toy_rewards.red --reward.a 1", "must be left out: `tests.cli.toy_rewards.red` is"),
        ("--reward tests.cli.toy_parts.Bright --reward.level x", "`--reward.level` must be a number, got 'x'."),
        ("--config toy.yaml", "toy.yaml:1: `model` is not a key of a reward's configuration; known: reward."),
        ("{red} --prompt x", "`--image FILE` or `--video PATH` is missing"),
        ("{red} --image red.png", "`--prompt TEXT` is missing"),
        ("{red} --image rde.png --prompt x", "`--image`: there is no file `rde.png`; did you mean `red.png`?"),
        ("{red} --image text.png --prompt x", "`--image` is `text.png`, which is not an image: cannot identify"),
        ("{red} --image frames --prompt x", "`--image` is `frames`, which is not an image: "),
        ("{red} --image red.png --prompt x --devce cpu", "`--devce` is not an option of `digenrl rewards try`; did"),
        ("{red} --image red.png --prompt x --device cqu", "`--device` must be a device of this machine, as cpu, got"),
        ("{red} --image red.png --prompt x --format yaml", "`--format` must be table or json, got `yaml`"),
        ("{red} --image red.png --prompt x --prompt y", "`--prompt` must be given once, or once for each of the 1 fil"),
        ("{red} --image red.png --prompt x --metadata {", "`--metadata` must be JSON such as"),
        ("{red} --image red.png --prompt x --metadata [1]", "`--metadata` must be a JSON object such as"),
        ("--reward tests.cli.toy_rewards.Column --image red.png --prompt x", "must have the column `score`, which the"),
        ("--reward tests.cli.toy_rewards.Shy --image red.png --prompt bad", "error: a prompt is bad."),
        (
            "--reward tests.cli.toy_rewards.GroupSize --image red.png --image grey.png --prompt x",
            "files must be of one size: the reward compares them with each other.",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_said_on_one_line(digenrl: Digenrl, words: str, message: str) -> None:
    assert message in digenrl("rewards", "try", *words.replace("{red}", " ".join(RED)).split()).error


def test_what_is_no_command_is_refused(digenrl: Digenrl) -> None:
    assert digenrl("rewards", "lst").error.endswith("`digenrl rewards lst` is not a command; did you mean `list`?")
    assert "`--reward` is not an option of `digenrl rewards list`" in digenrl("rewards", "list", *RED).error


def test_failed_reward_names_the_file_on_one_line(digenrl: Digenrl) -> None:
    shy = ["--reward", f"{TOYS}.Shy", "--reward.when", "asked"]
    images = ["--image", "red.png", "--image", "cyan.png", "--image", "grey.png"]
    prompts = ["--prompt", "good", "--prompt", "bad", "--prompt", "good"]
    result = digenrl("rewards", "try", *shy, *images, *prompts)
    assert (result.code, result.out) == (1, "")
    assert result.err == ["error: reward `Shy` for file `cyan.png`, prompt 'bad', failed: RuntimeError: cannot say."]


def test_reward_that_cannot_be_set_up_says_what_to_install(digenrl: Digenrl) -> None:
    result = digenrl("rewards", "try", "--reward", f"{TOYS}.Uninstalled", "--image", "red.png", "--prompt", "x")
    assert (result.code, len(result.err)) == (1, 1)
    assert result.err[0].endswith("reward Uninstalled needs the package y: pip install 'digenrl[y]'.")


def test_traceback_of_a_reward_is_printed_on_demand(digenrl: Digenrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_TRACEBACK", "1")
    words = ["--reward", "tests.cli.toy_parts.broken", "--image", "red.png", "--prompt", "x"]
    result = digenrl("rewards", "try", *words)
    assert result.code == 1
    assert "ValueError: the reward has a bug" in result.err
    assert result.err[-1].startswith("error: reward `broken` failed for 1 of 1 samples, the first for prompt 'x': Val")


def test_help_shows_the_settings_of_the_reward_that_is_named(digenrl: Digenrl) -> None:
    plain = digenrl("rewards", "--help").out
    assert plain == digenrl("rewards").out == digenrl("rewards", "list", "-h").out
    out = digenrl("rewards", "try", "--reward", "SeveralRewards", "--help").out
    assert out.startswith(plain)
    assert "--reward.mode normalize_then_sum|sum" in out


def test_what_a_reward_on_the_cpu_cannot_use_is_no_setting_of_it(digenrl: Digenrl) -> None:
    ocr = ["rewards", "try", "--reward", "OCRReward"]
    out = digenrl(*ocr, "--help").out
    assert "offload" not in out
    for setting in ("frames", "num_frames", "batch_size", "detect"):
        assert f"--reward.{setting} " in out
    error = digenrl(*ocr, "--reward.offload", "true").error
    assert error.startswith("error: `--reward.offload` is not a setting of OCRReward; ")
    printed = digenrl("fit", "--config", "toy.yaml", "--model.reward", "OCRReward", "--print_config").out
    assert "detect_size: 320" in printed
    assert "offload:" not in printed
