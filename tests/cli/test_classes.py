from __future__ import annotations

from lightning.pytorch import Callback

from digenrl import Trainer
from digenrl.cli.classes import known_classes, settings_of
from tests.cli.toy_parts import MyGRPO


def test_settings_behind_keywords_are_found_with_their_types() -> None:
    settings = settings_of(MyGRPO)
    assert list(settings)[0] == "margin"
    assert settings["group_size"].annotation is int
    assert settings["policy"].is_required
    assert not settings["lr"].is_required


def test_trainer_has_lightnings_settings_and_our_defaults() -> None:
    settings = settings_of(Trainer)
    assert settings["num_sanity_val_steps"].default == 0
    assert settings["max_steps"].annotation is int


def test_short_names_are_ours_and_lightnings() -> None:
    assert known_classes(Callback)["ModelCheckpoint"].__module__.startswith("lightning.")
    assert "Callback" in known_classes(Callback)
