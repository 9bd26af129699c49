"""Drafters that read a target over ranks: lossless; layers of other ranks are refused."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.settings.settings import StackSettings
from protocol.messages import Mode, Sampling, Tokens
from tests.support.stack import RunningStack, running
from tests.support.tiny_models import vocabulary_size, write_tiny_model
from tests.support.write_heads import dflash, eagle3, write_head

pytestmark = pytest.mark.processes

PROMPT = "the quick brown fox jumps over"
TOKENS = 40


def plain(stack: RunningStack, sampling: Sampling) -> Tokens:
    return stack.answer(PROMPT, mode="ar", sampling=sampling, max_tokens=TOKENS).tokens


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A head that reads the target's last layer too, which is computed for no other reason."""
    base = tmp_path_factory.mktemp("heads")
    target = write_tiny_model(base / "target", "llama", seed=1)
    config, tensors = eagle3(vocabulary_size(), layers=[1, 2, 3], trimmed=100)
    head = write_head(base / "head", config, tensors)
    settings = StackSettings(
        model=str(target),
        draft_model=str(head),
        target_ranks=2,
        restarts=50,
        prefill_step_size=4,  # prompts in pieces, each with states
    )
    with running(settings) as started:
        started.warm_up()
        yield started


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=3)])
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_head_reads_what_rank_0_computes(
    stack: RunningStack, mode: Mode, sampling: Sampling
) -> None:
    """Its states come from passes of all ranks, and the answer is plain decoding's."""
    answer = stack.answer(
        PROMPT, mode=mode, sampling=sampling, max_tokens=TOKENS, num_draft_tokens=3
    )
    assert stack.client.status().degraded == []
    assert answer.statistics.state_bytes > 0
    assert answer.tokens == plain(stack, sampling)


def test_a_rank_that_dies_is_read_again(stack: RunningStack) -> None:
    """The next group is tapped like the last one; the answer goes on with the same tokens."""
    expected = plain(stack, Sampling())
    [verifier] = [s for s in stack.client.status().services if s.role == "verifier"]
    todo = [rank.pid for rank in verifier.ranks if rank.rank == 1]

    def strike(count: int) -> None:
        if count >= 5 and todo:
            os.kill(todo.pop(), signal.SIGKILL)

    answer = stack.answer(PROMPT, max_tokens=TOKENS, num_draft_tokens=3, when=strike)
    assert answer.tokens == expected
    assert stack.pid("verifier") != verifier.pid
    assert stack.client.status().degraded == []


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("layers", [[2], [0, 2]])
def test_layers_of_a_pipeline_are_read_where_they_are(layers: list[int], tmp_path: Path) -> None:
    """Rank 0 has the last layer; a drafter that wants others drafts without."""
    target = write_tiny_model(tmp_path / "target", "qwen2", seed=1)
    config, tensors = dflash(320, "dflash", layers=layers, count=3)
    head = write_head(tmp_path / "head", config, tensors)
    settings = StackSettings(model=str(target), draft_model=str(head), target_ranks=2, split="1,2")
    with running(settings) as stack:
        answer = stack.answer(PROMPT, max_tokens=TOKENS, num_draft_tokens=3)
        assert answer.tokens == plain(stack, Sampling())
        degraded = " ".join(stack.client.status().degraded)
        assert ("without reading the target" in degraded) == (0 in layers)
        assert (answer.statistics.state_bytes > 0) == (0 not in layers)
