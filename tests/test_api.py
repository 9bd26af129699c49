"""The Python API: load once, answer many times, leave nothing."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlx_ssd import LLM, SamplingParams
from protocol.errors import UsageError
from protocol.messages import Finished, Text
from tests.stack import leftovers
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes


@pytest.fixture
def llm(run_dir: Path, tmp_path: Path) -> Iterator[LLM]:
    target = write_tiny_model(tmp_path / "t", "llama", seed=1)
    draft = write_tiny_model(tmp_path / "d", "llama", seed=1)
    with LLM(str(target), str(draft)) as loaded:
        yield loaded
    assert leftovers(run_dir) == []
    assert psutil.Process().children(recursive=True) == []


def test_answers_are_the_same_in_every_mode(llm: LLM) -> None:
    """The pair is loaded once, and the seed alone decides the answer."""
    params = {"temperature": 0.8, "seed": 3, "max_tokens": 24}
    plain = llm.generate(["one", "two"], SamplingParams(mode="ar", **params))
    fast = llm.generate(["one", "two"], SamplingParams(mode="ssd", **params))
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in fast]
    assert all(answer.seed == 3 for answer in fast)


def test_a_stream_ends_with_statistics_and_can_be_left(llm: LLM) -> None:
    """Text events, then Finished; leaving early cancels, and the next request is served."""
    *texts, end = llm.stream("hello", SamplingParams(max_tokens=8))
    assert isinstance(end, Finished)
    assert sum(len(event.tokens) for event in texts if isinstance(event, Text)) <= 8
    early = llm.stream("hello", SamplingParams(max_tokens=400))
    next(early)
    early.close()
    assert len(llm.generate(["hello"], SamplingParams(max_tokens=4))) == 1


def test_values_out_of_range_are_refused(llm: LLM) -> None:
    """The field that is wrong is named."""
    with pytest.raises(UsageError, match="top_p"):
        llm.generate(["x"], SamplingParams(top_p=2.0))
