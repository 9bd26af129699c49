"""Trees of draft tokens in real processes: plain decoding's tokens, whatever is done to logits."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from launch.settings.settings import StackSettings
from protocol.messages import LogitsOptions, Mode, Sampling, Tokens
from tests.support.stack import RunningStack, running
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.processes]

PROMPT: Tokens = [0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64]
LENGTH = 40
SAMPLINGS = {
    "greedy": Sampling(),
    "T0.8": Sampling(temperature=0.8, seed=3),
    "filters": Sampling(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02, seed=4),
    "penalties": Sampling(
        temperature=0.7,
        seed=5,
        logits_options=LogitsOptions(
            repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((33, 2.0), (8, -100.0))
        ),
    ),
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningStack]:
    """A target, and a drafter that is nearly it."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    target = write_tiny_model(folder / "target", request.param)
    drafter = write_tiny_model(folder / "drafter", request.param, noise=0.03)
    with running(StackSettings(model=str(target), draft_model=str(drafter))) as started:
        yield started


@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_tokens_are_those_of_plain_decoding(stack: RunningStack, mode: Mode, law: str) -> None:
    """Whatever is done to logits: filters, penalties, biases, temperatures."""
    sampling = SAMPLINGS[law]
    plain = stack.answer("", tokens=PROMPT, mode="ar", sampling=sampling, max_tokens=LENGTH)
    for nodes in (3, 8):
        answer = stack.until(
            lambda answer: answer.statistics.tree_rounds > 0,
            "trees come in time",
            partial(
                stack.answer,
                "",
                tokens=PROMPT,
                mode=mode,
                sampling=sampling,
                max_tokens=LENGTH,
                num_draft_tokens=3,  # else a tiny target is decoded plainly: drafts do not pay
                tree_nodes=nodes,
            ),
        )
        assert answer.tokens == plain.tokens
        assert answer.statistics.branch_tokens <= answer.statistics.accepted
