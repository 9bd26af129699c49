"""`ssd swap-drafter`: its flags, and what it says while the new drafter is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from launch.commands.generate import command as generate
from launch.commands.swap_drafter import SwapProgress, command
from launch.models.pair import Pair
from protocol.errors import UsageError


class Link:
    """An orchestrator whose drafter is this process."""

    pid = 0

    def request_status(self) -> None:
        pass

    def poll_status(self) -> Any:
        drafter = SimpleNamespace(role="drafter", pid=self.pid)
        return SimpleNamespace(services=[drafter] if self.pid else [])


@pytest.mark.parametrize("before", [0, 7])
def test_a_swap_says_how_far_it_is(before: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every ten seconds that it is loading, then once that it is ready."""
    link = Link()
    link.pid = before
    progress = SwapProgress(link, "MODEL")
    for second in range(25):
        progress.report(float(second))
    link.pid = 8
    for second in range(25, 60):
        progress.report(float(second))
    assert capsys.readouterr().err.splitlines() == [
        "still loading MODEL, 10 s so far",
        "still loading MODEL, 20 s so far",
        "ready: MODEL, after 25 s",
    ]


def test_flags_are_those_of_generate() -> None:
    """They have the names and values that `ssd generate` takes, `none` among them."""
    options = {option.name: option for option in generate.params}
    for option in command.params:
        if option.name != "name":
            assert option.name in options, option.name
    (backend,) = (option for option in command.params if option.name == "draft_backend")
    assert {*backend.type.choices} == {*options["draft_backend"].type.choices} - {"auto"}  # type: ignore[attr-defined]  # both are choices
    assert "none" in backend.type.choices  # type: ignore[attr-defined]  # likewise
    assert CliRunner().invoke(command, ["--backend", "ngram"]).exit_code == 2


@pytest.mark.usefixtures("run_dir")
def test_without_a_stack_nothing_is_loaded() -> None:
    """The error comes first, and alone."""
    done = CliRunner().invoke(command, ["--draft-backend", "none", "--name", "nobody"])
    assert isinstance(done.exception, UsageError)
    assert done.output == ""


def test_no_drafter_is_prompt_lookup() -> None:
    """`none` starts no process that drafts, and takes no model."""
    pair = Pair("target", "drafter", "mlx")
    assert pair.with_drafter("none", "") == Pair("target", "", "ngram")
    with pytest.raises(UsageError, match="takes no --draft-model"):
        pair.with_drafter("none", "drafter")
