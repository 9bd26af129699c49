"""A request that kills a real process each time is given up; the others keep every token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.settings.settings import StackSettings
from launch.stack import child
from protocol.errors import SsdError
from tests.hostile.bystanders import Bystanders
from tests.hostile.poisoned import DEADLY, PARALYSING
from tests.support.stack import RunningStack, eventually, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

MODULES = {
    "verifier": "services.verifier.main",
    "drafter": "services.drafter.main",
    "orchestrator": "orchestrator.main",
}
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> StackSettings:
    folder = tmp_path_factory.mktemp("models")
    return StackSettings(
        model=str(write_tiny_model(folder / "target", "llama", seed=1)),
        draft_model=str(write_tiny_model(folder / "draft", "llama", seed=1, noise=0.02)),
        hang_timeout_s=7.0,  # a busy machine holds up the honest, too
        restarts=1000,
    )


@pytest.fixture
def poisoned(
    request: pytest.FixtureRequest, settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningStack]:
    """A stack in which the process of one role cannot bear certain prompts."""
    start, module = child.subprocess.Popen, MODULES[request.param]

    def sabotaged(command: list[str], **options: Any) -> Any:
        if module in command:
            at = command.index(module)
            command = [*command[:at], "tests.hostile.poisoned", *command[at:]]
        return start(command, **options)

    monkeypatch.setattr(child.subprocess, "Popen", sabotaged)
    with running(settings) as stack:
        yield stack


def deaths(stack: RunningStack, role: str) -> int:
    return sum(line.role == role and line.state == "died" for line in stack.lines)


@pytest.mark.parametrize("poisoned", ["verifier"], indirect=True)
def test_a_request_that_ends_the_verifier_is_given_up(poisoned: RunningStack) -> None:
    """After two deaths at the same place it fails, and it is not tried again."""
    orchestrator = poisoned.client.status().pid
    with Bystanders(poisoned.supervisor.run_dir.clients_address) as bystanders:
        bystanders.await_answers(2)
        for poison in (DEADLY, PARALYSING):
            before = deaths(poisoned, "verifier")
            with pytest.raises(SsdError, match=r"the verifier died 2 times .* \(max_deaths\)"):
                poisoned.answer("", tokens=[poison, *PROMPT])
            with pytest.raises(SsdError, match="max_deaths"):
                poisoned.answer("", tokens=[poison, *PROMPT])
            bystanders.await_answers(4)
            assert deaths(poisoned, "verifier") == before + 2
        tally = bystanders.reset()
    assert (tally.failed, tally.changed) == ([], [])
    assert poisoned.client.status().pid == orchestrator


@pytest.mark.parametrize("poisoned", ["orchestrator"], indirect=True)
def test_a_request_that_ends_the_orchestrator_is_given_up(poisoned: RunningStack) -> None:
    """Its client asks again after each restart, and is refused the third time."""
    with Bystanders(poisoned.supervisor.run_dir.clients_address) as bystanders:
        bystanders.await_answers(2)
        for poison in (DEADLY, PARALYSING):
            before = deaths(poisoned, "orchestrator")
            for _ in range(2):
                with pytest.raises(SsdError, match="max_deaths"):
                    poisoned.answer("", tokens=[poison, *PROMPT])
            bystanders.await_answers(4)
            assert deaths(poisoned, "orchestrator") == before + 2
        tally = bystanders.reset()
    assert (tally.failed, tally.changed) == ([], [])


@pytest.mark.parametrize("poisoned", ["drafter"], indirect=True)
def test_a_request_that_ends_the_drafter_goes_on_without(poisoned: RunningStack) -> None:
    """Its tokens are the target's; drafts for the others go on."""
    plain = poisoned.answer("", tokens=[DEADLY, *PROMPT], mode="ar")
    # With more than two streams nothing is drafted, and without a fixed length maybe nothing.
    with Bystanders(poisoned.supervisor.run_dir.clients_address, count=1) as bystanders:
        bystanders.await_answers(2)
        answer = poisoned.answer("", tokens=[DEADLY, *PROMPT], num_draft_tokens=4)
        bystanders.await_answers(4)
        tally = bystanders.reset()
    assert answer.tokens == plain.tokens
    assert (tally.failed, tally.changed) == ([], [])
    eventually(lambda: deaths(poisoned, "drafter") > 0, "the drafter's death is reported")
    assert deaths(poisoned, "drafter") <= 2
    poisoned.warm_up()


def test_the_wrapper_is_what_kills(settings: StackSettings) -> None:
    """The same prompts are answered by honest processes."""
    assert Path(settings.model).is_dir()
    with running(settings) as stack:
        for poison in (DEADLY, PARALYSING):
            assert stack.answer("", tokens=[poison, *PROMPT]).tokens
