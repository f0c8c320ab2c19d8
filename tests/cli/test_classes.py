from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from digenrl import Trainer
from digenrl.algorithms import FlowGRPO
from digenrl.cli.classes import Setting, known_classes, settings_of
from tests.cli.toy_parts import MyGRPO, UntypedGRPO


def test_settings_behind_keywords_are_found_with_their_types() -> None:
    settings = settings_of(MyGRPO)
    assert list(settings)[0] == "margin"
    assert settings["group_size"].annotation is int
    assert settings["policy"].is_required
    assert not settings["lr"].is_required


def test_arguments_without_a_type_have_that_of_the_nearest_base_class() -> None:
    settings, base = settings_of(UntypedGRPO), settings_of(FlowGRPO)
    for name in ("policy", "reward"):
        assert settings[name] == base[name]
    assert settings["lr"] == Setting(float | None, None)
    assert settings["margin"] == Setting(Any, 0.5)
    assert UntypedGRPO.__init__.__annotations__ == {}


def test_trainer_has_lightnings_settings_and_our_defaults() -> None:
    settings = settings_of(Trainer)
    assert settings["num_sanity_val_steps"].default == 0
    assert settings["max_steps"].annotation is int


def test_short_names_are_ours_and_lightnings() -> None:
    assert known_classes(Callback)["ModelCheckpoint"].__module__.startswith("lightning.")
    assert "Callback" in known_classes(Callback)
