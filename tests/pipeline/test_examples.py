"""The examples for third parties: built by the system's compiler, run in real stacks."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from launch.settings.settings import StackSettings
from protocol.messages import Sampling
from tests.support.stack import RunningStack, running
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


@pytest.mark.model
@pytest.mark.parametrize("lines", [False, True], ids=["messages", "lines"])
def test_the_real_drafter_over_pipes_is_the_same_drafter(lines: bool) -> None:  # noqa: FBT001
    """The mlx backend behind pipes gives the tokens and the acceptance of the one inside."""
    flags = ["--lines"] if lines else []
    command = [sys.executable, "-m", "launch.cli", "draft-server", "--stdio", *flags]
    piped = StackSettings(draft_command=shlex.join(command), draft_lines=lines)
    prompt = "Write a Python function that adds the even numbers of a list."
    answers = []
    for settings in (StackSettings(), piped):
        with running(settings) as stack:
            ask = partial(stack.answer, prompt, max_tokens=48, num_draft_tokens=4)
            answers.append(
                stack.until(
                    lambda answer: "late" not in answer.statistics.fallbacks,
                    "all drafts come in time",
                    partial(ask, mode="sd"),
                )
            )
            if settings is piped:
                plain = stack.answer(prompt, mode="ar", max_tokens=48)
                # Lines cannot ask again about a token that a draft was asked after: hits are rare.
                ssd = stack.until(
                    lambda answer: lines or answer.statistics.cache_hits > 0, "a hit", ask
                )
    inside, outside = answers
    assert plain.tokens == inside.tokens == outside.tokens == ssd.tokens
    assert inside.statistics.drafted == outside.statistics.drafted
    assert inside.statistics.accepted == outside.statistics.accepted > 0
