from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import pytest
import yaml

from digenrl.cli.errors import SettingError
from digenrl.cli.merge import merge
from digenrl.cli.sources import ConfigFile, Option

SETTINGS = {"A": ("x", "y"), "B": ("y", "z")}


def merged(*sources: str) -> dict[str, Any]:
    """Merge files, written as YAML, and options, written as `--key=value`."""

    def read(text: str) -> ConfigFile | Option:
        if text.startswith("--"):
            name, _, value = text.partition("=")
            return Option.parse(name, value)
        return ConfigFile("x.yaml", yaml.safe_load(text), None)

    def accepted(name: str) -> Collection[str] | None:
        return SETTINGS.get(name)

    return merge([read(source) for source in sources], accepted)


def test_later_sources_win_key_by_key() -> None:
    assert merged("{a: {b: 1, c: 2}}", "{a: {c: 3}, d: [1]}", "{d: [2]}") == {"a": {"b": 1, "c": 3}, "d": [2]}


def test_settings_of_a_class_need_no_init_args_in_options() -> None:
    base = "{model: {class_path: A, init_args: {x: 1}}}"
    short, long = merged(base, "--model.x=2"), merged(base, "--model.init_args.x=2")
    assert short == long == {"model": {"class_path": "A", "init_args": {"x": "2"}}}


def test_a_class_given_by_name_takes_settings() -> None:
    assert merged("--model=A", "--model.x=1") == {"model": {"class_path": "A", "init_args": {"x": "1"}}}


def test_another_class_takes_over_what_it_knows_and_the_rest_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = merged("{model: {class_path: A, init_args: {x: 1, y: 2}}}", "--model=B")
    assert config == {"model": {"class_path": "B", "init_args": {"y": 2}}}
    assert caplog.messages == ["`model` is now B, which has no `x`: left out"]


def test_settings_of_the_default_class_survive_when_it_is_named() -> None:
    assert merged("{data: {p: 1}}", "{data: {class_path: A}}") == {"data": {"class_path": "A", "init_args": {"p": 1}}}


def test_plus_adds_to_a_list_and_later_options_mean_the_last_item() -> None:
    config = merged("{callbacks: [A]}", "--callbacks+=B", "--callbacks.y=1")
    assert config == {"callbacks": ["A", {"class_path": "B", "init_args": {"y": "1"}}]}


def test_a_number_says_which_item_of_a_list_is_meant() -> None:
    base = "{list: [{class_path: A, init_args: {x: 1}}, {class_path: B, init_args: {y: 2}, weight: 3}]}"
    config = merged(base, "--list.0.x=5", "--list.1.weight=6", "--list.1.init_args.y=7", "--list.0=B")
    assert config["list"][0] == {"class_path": "B", "init_args": {}}
    assert config["list"][1] == {"class_path": "B", "init_args": {"y": "7"}, "weight": "6"}


def test_an_item_that_is_not_in_the_list_is_refused() -> None:
    with pytest.raises(SettingError, match="`list.2.x` means item 2 of a list of 2, which are counted from 0."):
        merged("{list: [A, B]}", "--list.2.init_args.x=1")


def test_a_mapping_that_is_the_value_replaces_a_list() -> None:
    assert merged("{prompts: [a, b]}", "--prompts={c: 1}") == {"prompts": {"c": 1}}


def test_settings_cannot_go_into_what_is_no_mapping() -> None:
    with pytest.raises(SettingError, match="`model.init_args` must be a mapping, got 3"):
        merged("{model: {class_path: A, init_args: 3}}", "--model.x=1")


def test_sources_are_left_as_they_are() -> None:
    file = ConfigFile("x.yaml", {"a": {"b": [1]}}, None)
    merge([file, Option.parse("--a.b+", "2")], lambda _: None)
    assert file.values == {"a": {"b": [1]}}
