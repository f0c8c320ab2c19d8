"""The recipes in `examples/recipes` are complete runs, with the published settings in `examples/recipes/published`."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import digenrl.algorithms
from digenrl.algorithms import DGPO, DiffusionNFT
from digenrl.algorithms.reverse_process import ReverseProcessModule
from digenrl.averaging import EveryNth, RampDecay, WarmupDecay
from digenrl.cli import main
from digenrl.cli.check import check
from digenrl.cli.classes import accepted_names
from digenrl.cli.errors import SettingError
from digenrl.cli.merge import merge
from digenrl.cli.sources import read_config
from digenrl.diffusion import DanceSDE, FlowCPS, FlowSDE, WanLinearSDE
from digenrl.module import AdvantageSettings, DiffusionRLModule
from digenrl.types import Prompt, PromptBatch
from tests.cli.commands import TOY
from tests.toy import ToyPolicy, level_reward

ROOT = Path(__file__).parents[1]
BASE = ROOT / "examples/digits/flow_grpo.yaml"
RECIPES = {path.stem: path for path in sorted((ROOT / "examples/recipes/published").glob("*.yaml"))}
RUNS = {path.stem: path for path in sorted((ROOT / "examples/recipes").glob("*.yaml"))}

# A complete run, the published settings that it takes, and billions of parameters as published with the model, with
# what an adapter of its rank adds; the schedule as published, with its shift, and `-` for the pipeline's own.
COMPLETE = """
run                            published                  policy                  parameters  trained  schedule
sd35_flow_grpo_ocr             flow_grpo_sd3_geneval_ocr  StableDiffusion3Policy  2.24        0.0188   -
sd35_dgpo_ocr                  dgpo_sd3_ocr               StableDiffusion3Policy  2.24        0.0376   dpm/3
flux_flow_grpo_pickscore       flow_grpo_flux             FluxPolicy              11.9        0.105    -
flux_dance_grpo_pickscore      dance_grpo_flux_16gpu      FluxPolicy              11.9        11.9     dance/3
qwen_image_flow_grpo_vlm       flow_grpo_qwen_image       QwenImagePolicy         20.4        0.189    -
wan21_14b_flow_grpo_video_ocr  flow_grpo_wan              WanPolicy               14.3        0.105    -
hunyuan_video_dance_grpo       dance_grpo_hunyuan_video   HunyuanVideoPolicy      12.8        12.8     dance/5
"""

# As published, with groups and updates per rollout; `ema` is every how many steps the evaluated average, of decay 0.9,
# takes the weights in, and `-` what the publication does not say. Collected from the authors' repositories at
# yifan123/flow_grpo@879042c, XueZeyue/DanceGRPO@15cc71d, Tencent-Hunyuan/MixGRPO@e5cdd6a, Luo-Yihong/DGPO@01ceb4b and
# NVlabs/DiffusionNFT@24af555. Guidance that is an input of a distilled model counts as 1.
REVERSE_PROCESS = """
recipe                           class     steps eval ema kernel noise trained k  groups updates clip std   ddof KL   form  guidance norm lr   same grad
flow_grpo_sd3_geneval_ocr        FlowGRPO  10    40   8   flow   .7    9       24 48     2       1e-4 batch 0    .04  code  4.5      no   3e-4 no   1
flow_grpo_sd3_pickscore          FlowGRPO  10    40   8   flow   .7    9       24 48     2       1e-4 batch 0    .01  code  4.5      no   3e-4 no   1
flow_grpo_flux                   FlowGRPO  6     28   8   flow   .9    5       24 48     2       1e-4 batch 0    0    -     1        no   3e-4 no   1
flow_grpo_fast_cps_sd3_geneval   FlowGRPO  10    40   8   cps    .8    3       24 48     2       1e-5 batch 0    0    -     1        no   3e-4 no   1
flow_grpo_fast_cps_sd3_pickscore FlowGRPO  10    40   8   cps    .8    3       18 64     2       1e-5 batch 0    0    -     1        no   3e-4 no   1
flow_grpo_qwen_image             FlowGRPO  10    50   no  flow   1.2   2       16 32     2       1e-4 batch 0    0    -     4        yes  3e-4 no   1
flow_grpo_wan                    FlowGRPO  20    50   8   wan    -     19      4  -      2       1e-3 group 0    .004 paper 4.5      no   1e-4 no   1
grpo_guard_sd3                   GRPOGuard 10    40   8   flow   .7    9       24 48     2       2e-6 group 0    0    -     4.5      no   1e-4 no   1
mix_grpo_flux                    MixGRPO   25    -    -   flow   .7    4       12 -      4       1e-4 group 1    -    -     1        no   1e-5 yes  1
dance_grpo_flux_16gpu            DanceGRPO 16    -    -   dance  .3    9       12 -      3       1e-4 group 1    -    -     1        no   1e-5 yes  1
dance_grpo_flux_8gpu             DanceGRPO 16    -    -   dance  .3    9       12 -      2       1e-4 group 1    -    -     1        no   1e-5 yes  .01
dance_grpo_flux_lora             DanceGRPO 12    -    -   dance  .3    6       12 -      2       1e-4 group 1    -    -     1        no   3e-4 yes  1
dance_grpo_hunyuan_video         DanceGRPO 16    -    -   dance  .25   9       24 -      2       1e-4 group 1    -    -     1        no   1e-5 yes  1
dance_grpo_wan                   DanceGRPO 20    -    -   dance  .3    11      12 2      1       1e-4 group 1    -    -     5        no   1e-5 yes  1
"""  # noqa: E501 (a table)

FORWARD_PROCESS = """
recipe                  class        steps eval ema trained last k  groups updates clip beta KL    std   guidance of_reference old_from lr   grad
dgpo_sd3_geneval        DGPO         10    14   8   4       4    16 8      1       1e-2 100  .02   group 4.5      1            500      3e-4 1
dgpo_sd3_ocr            DGPO         10    14   8   4       6    16 8      1       1e-2 100  .02   batch 4.5      1            200      3e-4 1
dgpo_sd3_pickscore      DGPO         10    14   8   4       6    24 8      1       5e-2 10   .001  group 4.5      1            200      3e-4 1
dgpo_sd3_cfg_free       DGPO         10    10   8   4       4    16 8      1       1e-3 100  .02   group 1        4.5          500      3e-4 1
diffusion_nft_sd3       DiffusionNFT 10    40   1   9       9    24 48     1       -    1    .0001 batch 1        -            -        3e-4 1
diffusion_nft_sd3_ocr   DiffusionNFT 10    40   1   9       9    24 48     2       -    .1   .0001 batch 1        -            -        3e-4 1
diffusion_nft_sd3_multi DiffusionNFT 25    40   1   24      24   24 48     1       -    .1   .0001 batch 1        -            -        3e-4 1
"""  # noqa: E501

KERNELS = {"flow": FlowSDE, "dance": DanceSDE, "cps": FlowCPS, "wan": WanLinearSDE}


@pytest.fixture
def folder(restored_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with `toy.yaml`, and leave the process as it was."""
    (tmp_path / "toy.yaml").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(table: str) -> list[dict[str, str]]:
    head, *lines = table.strip().splitlines()
    return [dict(zip(head.split(), line.split(), strict=True)) for line in lines]


def configuration(recipe: str) -> dict[str, Any]:
    """The recipe over the digits example, checked as the command line does."""
    sources = [read_config(str(path)) for path in (BASE, RECIPES[recipe])]
    return check(merge(sources, accepted_names), "fit")


def make(recipe: str) -> DiffusionRLModule:
    model = configuration(recipe)["model"]
    cls = getattr(digenrl.algorithms, model["class_path"].rpartition(".")[2])
    module = cls(**{**model["init_args"], "policy": ToyPolicy(), "reward": level_reward})
    assert isinstance(module, DiffusionRLModule)
    return module


def prompts_of(module: DiffusionRLModule, step: int = 0) -> PromptBatch:
    return PromptBatch.for_step([Prompt("low", 0)], step=step, group_size=module.group_size, seed=0)


def assert_published(recipe: str, published: dict[str, Any]) -> None:
    """Compare what every algorithm has; what is not published is not compared."""
    module, config = make(recipe), configuration(recipe)
    data = config["data"]["init_args"]
    trainer = read_config(str(RECIPES[recipe])).values["trainer"]  # the digits example clips gradients, too
    found = {
        "class": type(module).__name__,
        "steps": module.num_steps,
        "eval": module.validation_steps,
        "trained": module.select_timesteps(prompts_of(module)).shape[1],
        "k": module.group_size,
        "groups": data["prompts_per_step"] * module.updates_per_rollout,
        "updates": module.updates_per_rollout,
        "guidance": module.guidance_scale,
        "lr": module.lr,
        "grad": trainer["gradient_clip_val"],
    }
    for name, value in found.items():
        if published[name] != "-":
            assert value == (published[name] if isinstance(value, str) else float(published[name])), name
    if published["ema"] != "-":
        average = None if published["ema"] == "no" else WarmupDecay(0.9, int(published["ema"]))
        assert module._schedules.get("ema") == average
    ddof = int(published.get("ddof", "0"))
    eps = {0: 1e-4, 1: 1e-8}[ddof]
    assert module.advantage_settings == AdvantageSettings(scope=published["std"], ddof=ddof, eps=eps, clip=5.0)
    assert module.weight_decay == 1e-4


@pytest.mark.parametrize("published", rows(REVERSE_PROCESS), ids=lambda row: row["recipe"])
def test_recipes_of_the_reverse_process_are_the_published_settings(published: dict[str, str]) -> None:
    module = make(published["recipe"])
    assert isinstance(module, ReverseProcessModule)
    assert_published(published["recipe"], published)
    kernel, noise = KERNELS[published["kernel"]], published["noise"]
    assert module.kernel == (kernel() if noise == "-" else kernel(float(noise)))
    assert module.clip_range == float(published["clip"])
    assert module.init_same_noise == (published["same"] == "yes")
    assert module.guidance_rescale == {"yes": "norm", "no": "none"}[published["norm"]]
    if published["KL"] != "-":
        assert module.kl_beta == float(published["KL"])
        assert published["form"] in ("-", module.kl_form)


@pytest.mark.parametrize("published", rows(FORWARD_PROCESS), ids=lambda row: row["recipe"])
def test_recipes_of_the_forward_process_are_the_published_settings(published: dict[str, str]) -> None:
    module = make(published["recipe"])
    assert isinstance(module, DGPO | DiffusionNFT)
    assert_published(published["recipe"], published)
    assert (module.solver, module.validation_solver) == ("dpm", "dpm")
    assert (module.beta, module.kl_beta) == (float(published["beta"]), float(published["KL"]))
    drawn = {int(index) for step in range(100) for index in module.select_timesteps(prompts_of(module, step)).flatten()}
    assert drawn == set(range(int(published["last"]) + 1))
    old = RampDecay(rate=0.001, cap=0.3 if isinstance(module, DGPO) else 0.5)
    assert module._schedules["old"] == (old if isinstance(module, DGPO) else EveryNth(old, module.updates_per_rollout))
    if isinstance(module, DGPO):
        assert (module._reference_name, module.clips_kl) == ("reference", False)
        assert module.clip_range == float(published["clip"])
        assert module.reference_guidance_scale == float(published["of_reference"])
        assert module.old_rollout_from == int(published["old_from"])


@pytest.mark.parametrize(
    ("recipe", "size", "stop"),
    [("flow_grpo_fast_cps_sd3_geneval", 3, 5), ("flow_grpo_qwen_image", 2, 5), ("mix_grpo_flux", 4, 24)],
)
def test_windows_move_within_their_bounds(recipe: str, size: int, stop: int) -> None:
    module = make(recipe)
    windows = [module.recorded_steps(step) for step in range(2200)]
    assert {index for window in windows for index in window} == set(range(stop))
    assert {len(window) for window in windows} == {size}


def test_mix_grpo_moves_its_window_after_25_rollouts() -> None:
    module = make("mix_grpo_flux")
    moves = [step for step in range(1, 500) if module.recorded_steps(step) != module.recorded_steps(step - 1)]
    assert moves == [100, 200, 300, 400]  # of 4 updates each
    assert module.recorded_steps(100) == range(1, 5)
    assert module.recorded_steps(2100) == module.recorded_steps(0) == range(4)


def test_dance_grpo_trains_each_sample_at_timesteps_of_its_own() -> None:
    for recipe in (name for name in RECIPES if name.startswith("dance_grpo")):
        module = make(recipe)
        assert len(set(map(frozenset, module.select_timesteps(prompts_of(module)).tolist()))) > 1


def test_hunyuan_video_trains_the_best_and_the_worst() -> None:
    module = make("dance_grpo_hunyuan_video")
    rewards = torch.arange(24.0)
    kept = module.select_samples(rewards, rewards, torch.zeros(24, dtype=torch.int64))
    assert kept == [*range(4), *range(20, 24)]


def test_every_recipe_has_a_row() -> None:
    assert {row["recipe"] for table in (REVERSE_PROCESS, FORWARD_PROCESS) for row in rows(table)} == RECIPES.keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_value_has_its_source(recipe: str) -> None:
    lines = [line for line in RECIPES[recipe].read_text().splitlines() if not line.startswith("#")]
    values = [line for line in lines if not line.partition("#")[0].rstrip().endswith(":") and "class_path" not in line]
    assert len(values) > 10
    for line in values:
        assert re.search(r"  # (\w+@[0-9a-f]{7}|digenrl: )", line), line


def test_a_recipe_cannot_say_what_nothing_reads(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(RECIPES["dgpo_sd3_ocr"].read_text().replace("clip_range:", "lora_rank: 32\n    clip_range:"))
    with pytest.raises(SettingError, match="`model.lora_rank` is not a setting of DGPO"):
        check(merge([read_config(str(BASE)), read_config(str(wrong))], accepted_names), "fit")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_over_another_configuration(recipe: str, folder: Path) -> None:
    short = "--data.prompts_per_step 2 --trainer.max_steps 2 --trainer.strategy.trainer_assist off"
    assert main(["fit", "--config", "toy.yaml", "--config", str(RECIPES[recipe]), *short.split()]) == 0
    metrics = list(csv.DictReader((folder / "runs/version_0/metrics.csv").open()))
    assert [math.isfinite(float(row["loss"])) for row in metrics] == [True, True]


@pytest.mark.parametrize("run", rows(COMPLETE), ids=lambda row: row["run"])
def test_a_complete_run_has_the_published_settings(run: dict[str, str]) -> None:
    """All of them; a run adds the policy, the reward, the workers, and where the number of groups was left open."""
    complete, published = (read_config(str(path)).values for path in (RUNS[run["run"]], RECIPES[run["published"]]))
    assert complete["model"]["class_path"] == published["model"]["class_path"]
    settings = dict(complete["model"]["init_args"])
    policy = settings.pop("policy")
    assert policy["class_path"] == run["policy"]
    schedule, _, shift = run["schedule"].partition("/")
    chosen = {} if schedule == "-" else {"schedule": schedule, "schedule_shift": float(shift)}
    assert {name: value for name, value in policy["init_args"].items() if name.startswith("schedule")} == chosen
    noted = re.findall(r"`schedule: (\w+)` and `schedule_shift: (\d)", RECIPES[run["published"]].read_text())
    assert noted == ([] if schedule == "-" else [(schedule, shift)])
    assert "reward" in settings
    del settings["reward"]
    assert settings == published["model"]["init_args"]
    assert complete["trainer"]["gradient_clip_val"] == published["trainer"]["gradient_clip_val"]
    for name, value in published.get("data", {}).items():
        assert complete["data"][name] == value
    strategy = complete["trainer"]["strategy"]["init_args"]
    for name, value in published["trainer"].get("strategy", {}).items():
        assert strategy[name] == value
    assert strategy["generators"] * strategy.get("devices_per_generator", 1) == strategy["trainers"] == 8


@pytest.mark.parametrize("run", rows(COMPLETE), ids=lambda row: row["run"])
def test_a_complete_run_can_be_dry_run(
    run: dict[str, str], restored_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that a run checks before it starts workers, on a policy of the published size."""
    monkeypatch.chdir(ROOT)
    before = set(ROOT.glob("runs/*"))
    assert main(["fit", "--config", str(RUNS[run["run"]]), "--dry_run"]) == 0
    assert set(ROOT.glob("runs/*")) == before
    out = capsys.readouterr().out
    policy = next(line.split() for line in out.splitlines() if line.startswith(" policy "))
    count, trained = (float(value.replace(",", "")) / 1e9 for value in policy[1:])
    adapter = 0.0 if run["trained"] == run["parameters"] else float(run["trained"])
    assert count - adapter == pytest.approx(float(run["parameters"]), rel=0.005)
    assert trained == pytest.approx(float(run["trained"]), rel=0.005)
    shares = next(line.split() for line in out.splitlines() if line.startswith(" of the 80 GiB of a h100 "))[-2:]
    assert all(int(share.removesuffix("%")) <= 80 for share in shares)
    assert "could not be traced" not in out
    assert "Predicted:" in out


def test_every_complete_run_is_tested() -> None:
    assert {row["run"] for row in rows(COMPLETE)} == RUNS.keys()


def test_prompts_of_recipes_are_enough() -> None:
    for path in RUNS.values():
        data = read_config(str(path)).values["data"]
        prompts = (ROOT / data["prompts"]).read_text().splitlines()
        assert len(set(prompts)) == len(prompts) >= data["prompts_per_step"]
        if "sign" in data["prompts"]:
            assert all('"' in prompt for prompt in prompts)  # what the reward looks for
