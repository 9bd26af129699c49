"""The real pair under the rejection rule: its tokens have the target's own law (chi-square)."""

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from launch.models.pair import pair_of
from launch.settings.settings import StackSettings
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.rejection import Distribution, target_distribution
from protocol.decoding.sampling_params import drafter_sampling
from protocol.messages import (
    ChatMessage,
    OpenSequence,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.drafter.backends.base import DraftedToken, RoundOptions
from services.drafter.backends.mlx import MlxBackend
from services.engine.pass_handle import PassHandle, Submission
from services.mlx.loader import load
from services.verifier.acceptance import AcceptanceRule, host_floats
from services.verifier.verifier import Verifier
from tests.support.chi_square import ONE_IN_A_THOUSAND, assert_law
from tests.support.reference import drafts

pytestmark = pytest.mark.model

ANSWERS = 240
QUESTION = "Name a colour, and say why you like it."
PLAIN = Sampling(temperature=1.0, acceptance="rejection")
SAMPLINGS = {
    "cold draft": msgspec.structs.replace(PLAIN, draft_temperature=0.2),
    "saguaro": msgspec.structs.replace(PLAIN, saguaro=0.1),
}
"""Drafts that differ from the target by so much that a wrong rule shows soon."""
BINS = 6


class Rewinding(Verifier):
    """Judges as ever, but takes every chain back, and computes none twice."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rows: dict[tuple[int, ...], mx.array] = {}
        queue: Any = self.scheduler.queue
        self._computed = queue.result
        queue.result = self._remembered

    def _remembered(self, submission: Submission) -> PassHandle:
        part = submission.part
        key = tuple(part.tokens)
        if key not in self.rows:
            length = part.state.length
            self.rows[key] = self._computed(submission).logits
            mx.eval(self.rows[key])
            part.state.commit(length)
        submission.passes.clear()
        submission.passes.append(PassHandle(state=part.state, logits=self.rows[key]))
        return submission.passes[0]

    def distribution(self, chain: Tokens, row: int) -> Distribution:
        """p after so many draft tokens of a chain."""
        return target_distribution(host_floats(self.rows[tuple(chain)])[row], PLAIN)


class Rounds:
    """One question, and many first rounds of its answer, each with a seed of its own."""

    def __init__(self) -> None:
        pair = pair_of(StackSettings())
        prompt = TargetTokenizer(Path(pair.model)).encode([ChatMessage("user", QUESTION)])
        self.pending = prompt.pop()
        self.base = len(prompt)
        self.prompt, self.folder = prompt, Path(pair.model)
        self.verifier = Rewinding(load(self.folder), 512)
        self.drafter = MlxBackend(Path(pair.draft_model), 512)
        list(self.verifier.handle(OpenSequence(sequence=1, tokens=prompt, sampling=PLAIN)))
        sequence: Any = self.verifier._sequences[1]
        sequence.commit = lambda tree, rows: None
        list(self.drafter.open(1, prompt, PLAIN))

    def play(self, sampling: Sampling) -> tuple[Tokens, Tokens]:
        """The chain of a round with two draft tokens, and what it commits."""
        opened = OpenSequence(sequence=1, tokens=self.prompt, sampling=sampling)
        self.verifier._sequences[1].rule = AcceptanceRule(opened, self.folder)
        self.drafter._sequences[1].sampling = drafter_sampling(sampling)
        draft: list[DraftedToken] = drafts(
            self.drafter.draft(1, self.pending, 2, RoundOptions(1, 3))
        )
        chain = [self.pending, *(found.token for found in draft)]
        laws = [found.distribution for found in draft]
        asked = Verify(sequence=1, round=1, position=self.base, nodes=chain, distributions=laws)
        [outcome] = self.verifier.handle(asked)
        assert isinstance(outcome, VerificationOutcome)
        accepted: int = outcome.accepted
        return chain, [*chain[1 : accepted + 1], outcome.bonus]


def bin_of(law: Distribution, token: int) -> tuple[int, list[float]]:
    """Which of some bins of about equal probability a token is in, and what each of them holds."""
    middles = np.cumsum(law.probabilities) - law.probabilities / 2
    bins = np.minimum(BINS - 1, (middles * BINS).astype(int))
    shares = np.bincount(bins, weights=law.probabilities, minlength=BINS)
    return int(bins[law.ids == token][0]), [float(share) for share in shares]


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    return Rounds()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_follow_the_targets_law(rounds: Rounds, sampling: Sampling) -> None:
    """The first token, and the second given the first, have the law of plain decoding."""
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    expected = np.zeros(BINS)
    drafted = 0
    for seed in range(ANSWERS):
        chain, tokens = rounds.play(msgspec.structs.replace(sampling, seed=seed))
        first[tokens[0]] += 1
        drafted += len(tokens) - 1
        if len(tokens) > 1:  # then the second token was judged, or drawn, after the first
            index, shares = bin_of(rounds.verifier.distribution(chain, 1), tokens[1])
            second[index] += 1
            expected += shares
    law = rounds.verifier.distribution(chain, 0)
    assert_law(
        first,
        dict(zip(law.ids.tolist(), law.probabilities.tolist(), strict=True)),
        ONE_IN_A_THOUSAND,
    )
    assert_law(second, dict(enumerate(expected / second.total())), ONE_IN_A_THOUSAND)
    assert ANSWERS / 10 < second.total() < drafted < 2 * ANSWERS
