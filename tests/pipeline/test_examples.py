"""The examples for third parties: built by the system's compiler, run in real stacks."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor
from protocol.messages import Done, Sampling, SwapDrafter
from tests.support.stack import DEADLINE_S, Answered, RunningStack, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROMPT = "the quick brown fox jumps over the quick brown fox"


@pytest.fixture(scope="module", params=["message_drafter", "line_drafter"])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningStack]:
    """A stack whose drafter is an example in C."""
    folder = tmp_path_factory.mktemp("example drafters")
    program, source = folder / request.param, EXAMPLES / f"{request.param}.c"
    compiler = shutil.which("cc")
    assert compiler is not None, "the project needs a C compiler `cc`"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2"]
    subprocess.run([compiler, *strict, "-o", str(program), str(source)], check=True)
    settings = StackSettings(
        model=str(write_tiny_model(folder / "target", "llama", seed=1)),
        draft_command=f"'{program}'",
        draft_lines=request.param.startswith("line"),
        draft_timeout_s=DEADLINE_S,
    )
    with running(settings) as started:
        yield started


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6, seed=3)], ids=str)
def test_an_example_drafts_without_changing_a_token(
    stack: RunningStack, sampling: Sampling
) -> None:
    """Both modes give the tokens of plain decoding; some drafts were right."""
    plain = stack.answer(PROMPT, mode="ar", sampling=sampling, max_tokens=64)
    greedy = sampling.temperature == 0.0
    for mode in ("sd", "ssd"):
        answer = stack.until(
            lambda answer: (
                (answer.statistics.accepted if greedy else answer.statistics.drafted) > 0
            ),
            "drafts come in time",
            partial(
                stack.answer,
                PROMPT,
                mode=mode,
                sampling=sampling,
                max_tokens=64,
                num_draft_tokens=3,
            ),
        )
        assert plain.tokens == answer.tokens
        assert answer.statistics.drafter_restarts == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> StackSettings:
    base = tmp_path_factory.mktemp("models")
    target = write_tiny_model(base / "target", "llama", seed=1)
    draft = write_tiny_model(base / "draft", "llama", seed=1, noise=0.1)
    return StackSettings(model=str(target), draft_model=str(draft))


def test_the_mlx_drafter_over_pipes_is_the_same_drafter(models: StackSettings) -> None:
    """Behind pipes, it gives the tokens and the acceptance of the one inside."""
    server = ["draft-server", "--stdio", "--model", models.draft_model]
    command = [sys.executable, "-m", "launch.cli", *server]
    swaps = (
        SwapDrafter(backend="stdio", command=command),
        SwapDrafter(backend="stdio", command=[*command, "--lines"], lines=True),
    )
    with running(models) as stack:
        ask = partial(stack.answer, PROMPT, max_tokens=48, num_draft_tokens=4)

        def drafted() -> Answered:
            return stack.until(
                lambda answer: (
                    answer.statistics.drafted > 0 and "late" not in answer.statistics.fallbacks
                ),
                "all drafts come in time",
                partial(ask, mode="sd"),
            )

        plain, inside = ask(mode="ar"), drafted()
        assert plain.tokens == inside.tokens
        for swap in swaps:
            reply = ask_supervisor(stack.supervisor.run_dir.path.name, swap, DEADLINE_S)
            assert reply == Done()
            outside = drafted()
            assert outside.tokens == plain.tokens
            assert outside.statistics.drafted == inside.statistics.drafted
            assert outside.statistics.accepted == inside.statistics.accepted > 0
            # Lines cannot ask again about a token that a draft was asked after: hits are rare.
            has_hit = partial(_has_hit, needed=not swap.lines)
            assert stack.until(has_hit, "a hit", ask).tokens == plain.tokens


def _has_hit(answer: Answered, *, needed: bool) -> bool:
    return answer.statistics.cache_hits > 0 or not needed
