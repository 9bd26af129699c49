"""Which running stack a command attaches to."""

import os
from pathlib import Path
from typing import Any

import pytest

from launch.models.coreml_models import default_conversion_dir
from launch.settings.settings import StackSettings, name_settings
from launch.stack.run_dir import Description
from launch.stack.session import find_differences
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(write_tiny_model(folder / name, "llama")) for name in ("target", "draft", "other")]


def _running(models: list[str], **settings: Any) -> Description:
    return Description(os.getpid(), 0.0, models[0], models[1], settings=settings)


def test_what_is_not_named_is_not_wanted(models: list[str]) -> None:
    """A stack may be of any kind for who asks for nothing in particular."""
    stack = _running(models, decode_concurrency=9, target_device="cpu", draft_backend="mlx")
    assert find_differences(stack, StackSettings()) == []
    assert find_differences(stack, StackSettings(model=models[0], draft_model=models[1])) == []


def test_the_settings_that_the_stack_was_started_with_fit(models: list[str]) -> None:
    """As where both read them from one file."""
    wanted = StackSettings(
        model=models[0],
        draft_model=models[1],
        decode_concurrency=9,
        http=True,
        api_key="secret",
    )
    named = name_settings(wanted)
    assert set(named) == {"model", "draft_model", "decode_concurrency"}
    assert find_differences(_running(models, **named, draft_backend="mlx"), wanted) == []


@pytest.mark.parametrize(
    "wanted",
    [
        {"draft_backend": "ngram"},
        {"decode_concurrency": 2},
        {"draft_server": "tcp://127.0.0.1:1"},
        {"target_device": "cpu"},
    ],
    ids=lambda wanted: next(iter(wanted)),
)
def test_what_is_named_must_be_so(models: list[str], wanted: dict[str, Any]) -> None:
    stack = _running(models, draft_backend="mlx", decode_concurrency=9)
    assert find_differences(stack, StackSettings(**wanted)) == list(wanted)


@pytest.mark.parametrize("name", ["model", "draft_model"])
def test_a_model_is_known_by_its_folder(models: list[str], name: str) -> None:
    """However it is written."""
    stack = _running(models)
    own = {"model": models[0], "draft_model": models[1]}[name]
    winding = Path(own) / ".." / Path(own).name
    assert find_differences(stack, StackSettings(**{name: str(winding)})) == []
    assert find_differences(stack, StackSettings(**{name: models[2]})) == [name]


def test_a_converted_drafter_is_known_by_its_model(models: list[str]) -> None:
    """Whose converted form is next to it."""
    converted = default_conversion_dir(Path(models[1]))
    converted.mkdir()
    (converted / "coreml.json").touch()
    stack = _running([models[0], str(converted)], draft_backend="coreml")
    assert find_differences(stack, StackSettings(draft_model=models[1])) == []
    assert find_differences(stack, StackSettings(draft_model=models[2])) == ["draft_model"]
