"""Whatever is wrong is said on one line, with exit code 2, before a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import TOY, Digenrl

OPTIONS = [
    # misspelt names
    ("--model.clip_rnage 1e-4", "`--model.clip_rnage` is not a setting of FlowGRPO; did you mean `clip_range`?"),
    ("--trainer.strategy.generatos 2", "is not a setting of DisaggregatedStrategy; did you mean `generators`?"),
    ("--trainer.max_step 2", "`--trainer.max_step` is not a setting of Trainer; did you mean `max_steps`?"),
    ("--model.policy.hiddn 8", "`--model.policy.hiddn` is not a setting of ToyPolicy; did you mean `hidden`?"),
    ("--ckpt_pth x.ckpt", "`--ckpt_pth` is not a key of the configuration of `digenrl fit`; did you mean `ckpt_path`?"),
    # unknown classes
    ("--model FlowGPRO", "`--model` names no class that is known, `FlowGPRO`; did you mean `FlowGRPO`?"),
    ("--model.policy tests.tooy.ToyPolicy", "there is no module `tests.tooy`; did you mean `tests.toy`?"),
    ("--model.policy tests.toy.ToyPolcy", "module `tests.toy` has no `ToyPolcy`; did you mean `ToyPolicy`?"),
    ("--trainer.strategy DisagregatedStrategy", "did you mean `DisaggregatedStrategy`?"),
    ("--trainer.strategy disagregated", "did you mean `disaggregated`?"),
    ("--trainer.callbacks+ ModelChekpoint", "`ModelChekpoint`; did you mean `ModelCheckpoint`?"),
    (
        "--model.policy digenrl.DiffusionPolcy",
        "module `digenrl` has no `DiffusionPolcy`; did you mean `DiffusionPolicy`?",
    ),
    ("--model.policy tests.toy.ToyPolicy.build", "there is no module `tests.toy.ToyPolicy`; modules are looked for in"),
    # classes and functions of another kind
    ("--model.policy tests.toy.ToyCondition", "must be a DiffusionPolicy, got the class tests.toy.ToyCondition."),
    ("--model digenrl.DiffusionRLModule", "is abstract: a subclass must define `rollout`, `timestep_loss`."),
    ("--model.reward tests.toy.WORDS", "must be a function or a class whose objects can be called, got `tests.toy"),
    ("--model.reward tests.cli.toy_parts.Silent", "must be a function or a class whose objects can be called"),
    # wrong types
    ("--trainer.max_steps abc", "`--trainer.max_steps` must be a whole number, got 'abc'."),
    ("--model.lr fast", "`--model.lr` must be a number, got 'fast'."),
    (
        "--trainer.strategy.engine lokel",
        "`--trainer.strategy.engine` must be one of `auto`, `local`, `ray`, `inline`, got 'lokel'.",
    ),
    ("--trainer.strategy.snapshot every_3", "`snapshot` every_3 is for runs that start workers again, but"),
    ("--trainer.strategy.snapshot often", "`snapshot` must be every_step, every_N with a number N of steps, or off"),
    ("--trainer.strategy.sharding fsdp", "`sharding` fsdp shares the policy among trainers, but `trainers` is 1"),
    (
        "--trainer.strategy.ray_address 10.0.0.1:6379 --trainer.strategy.engine local",
        "`ray_address` needs engine `ray`",
    ),
    ("--seed_everything x", "`--seed_everything` must be true or false or a whole number, got 'x'."),
    ("--trainer.max_steps null", "`--trainer.max_steps` must be a whole number, got 'null'."),
    # values that constructors refuse
    ("--model.group_size 1", "--model.group_size: `group_size` must be at least 2, got 1"),
    ("--data.prompts_per_step 9", "--data.prompts_per_step: `prompts_per_step` is 9, but `prompts` holds 4"),
    (
        "--trainer.strategy.generators 0",
        "--trainer.strategy.generators: `generators` is a count and must be at least 1",
    ),
    ("--data.prompts pronpts.txt", "--data.prompts: `prompts`: there is no file `pronpts.txt`"),
    ("--model.policy.hidden -1 --model.reward tests.cli.toy_parts.Buggy", "Buggy: TypeError: unsupported operand"),
    ("--trainer.accelerator quantum", "--trainer.accelerator: You selected an invalid accelerator name"),
    # values that do not fit together, found by the strategy
    (
        "--data.prompts_per_step 4 --trainer.strategy.groups_per_micro_batch 3",
        "--trainer.strategy.groups_per_micro_batch: `groups_per_micro_batch` must divide the 4 prompts",
    ),
    # checkpoints
    ("--ckpt_path nope.ckpt", "`--ckpt_path` is `nope.ckpt`, which does not exist"),
    ("--ckpt_path toy.yml", "`--ckpt_path` is `toy.yml`, which does not exist; did you mean `toy.yaml`?"),
    ("--ckpt_path toy.yaml", "`--ckpt_path` is `toy.yaml`, which is not a checkpoint"),
    ("--ckpt_path last", "`--ckpt_path` is `last`, but no run folder in `runs` has a checkpoint."),
    # words that are no options
    ("--model.lr", "`--model.lr` needs a value, got nothing."),
    ("--model.lr --model.seed 3", "`--model.lr` needs a value, got `--model.seed`."),
    ("toy.yaml", "`toy.yaml` is not an option; settings are `--key value`."),
    ("--data.prompts [low", "the value of `--data.prompts` is not valid YAML"),
    ("--config tooy.yaml", "`--config`: there is no file `tooy.yaml`; did you mean `toy.yaml`?"),
]

FILES = [
    (
        "group_size: 4",
        "grop_size: 4",
        "bad.yaml:6: `model.grop_size` is not a setting of FlowGRPO; did you mean `group_size`?",
    ),
    ("prompts_per_step", "prompt_per_step", "bad.yaml:11: `data.prompt_per_step` is not a setting of PromptData"),
    ("engine: inline", "engin: inline", "bad.yaml:16: `trainer.strategy.engin` is not a setting of Disaggregated"),
    (
        "trainer:",
        "trianer:",
        "bad.yaml:12: `trianer` is not a key of the configuration of `digenrl fit`; did you mean `trainer`?",
    ),
    ("    init_args:\n      engine", "    init_arg:\n      engine", "bad.yaml:15: `trainer.strategy.init_arg` is not"),
    ("FlowGRPO", "PPO", "bad.yaml:2: `model.class_path` names no class that is known, `PPO`; known: "),
    ("group_size: 4", "group_size: four", "bad.yaml:6: `model.group_size` must be a whole number, got 'four'."),
    ("group_size: 4", "group_size: 1", "bad.yaml:6: `group_size` must be at least 2, got 1"),
    ("policy: tests.toy.ToyPolicy", "policy: null", "bad.yaml:4: `model.policy` must be a DiffusionPolicy, got null."),
    ("policy: tests.toy.ToyPolicy", "policy: {hidden: 8}", "bad.yaml:4: `model.policy` needs a `class_path`"),
    (
        "    policy: tests.toy.ToyPolicy\n",
        "",
        "bad.yaml:1: `model.policy` is missing, FlowGRPO needs it: a DiffusionPolicy.",
    ),
    ("  prompts_per_step: 2\n", "", "bad.yaml:9: `data.prompts_per_step` is missing, PromptData needs it"),
    (
        "    init_args:\n      engine: inline",
        "    init_args: 3",
        "bad.yaml:13: `trainer.strategy` must be a mapping of",
    ),
    ("max_steps: 2", "max_steps: 2\n  max_steps: 3", "bad.yaml:18: `max_steps` is given twice, first in line 17."),
    ("max_steps: 2", "max_steps: 2: 3", "bad.yaml:17: not valid YAML: mapping values are not allowed here."),
    (TOY, "- 1\n", "bad.yaml: a configuration must be a mapping"),
    (TOY, "", "`model` is missing; give `--config FILE`, or `--model CLASS` and its settings."),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_a_wrong_option_is_said_on_one_line(digenrl: Digenrl, options: str, message: str) -> None:
    assert message in digenrl("fit", "--config", "toy.yaml", *options.split()).error


@pytest.mark.parametrize(("right", "wrong", "message"), FILES)
def test_a_mistake_in_a_file_is_said_with_its_line(
    digenrl: Digenrl, folder: Path, right: str, wrong: str, message: str
) -> None:
    assert right in TOY
    (folder / "bad.yaml").write_text(TOY.replace(right, wrong))
    assert message in digenrl("fit", "--config", "bad.yaml").error


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("misspelt", "def reward(:", "SyntaxError"),
        ("lacking", "import absent_package", "No module named 'absent_package'"),
        ("failing", "x = 1 / 0", "ZeroDivisionError: division by zero ("),
    ],
)
def test_a_module_that_cannot_be_imported_is_said_on_one_line(
    digenrl: Digenrl, folder: Path, name: str, source: str, message: str
) -> None:
    (folder / f"{name}.py").write_text(source)
    error = digenrl("fit", "--config", "toy.yaml", "--model.reward", f"{name}.reward").error
    assert f"`--model.reward` is `{name}.reward`, but importing it failed: " in error
    assert message in error
