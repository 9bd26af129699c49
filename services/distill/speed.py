"""Measure the pair's cost on this machine, and predict the speed-up.

It is measured with the services' own code in one process, target and drafter in turn. A stack runs
them concurrently: where they share cores or a GPU, both are slower.
"""

import time
from pathlib import Path
from statistics import median

import msgspec

from protocol.decoding.token_tree import read_tree
from protocol.messages import OpenSequence, Sampling, Tokens, VerificationOutcome, Verify
from services.distill.evaluation import Figures
from services.drafter.backends.mlx import MlxBackend
from services.mlx.loader import LoadedModel
from services.verifier.verifier import Verifier

CHAINS = (1, 2, 3, 4, 5)
BRANCHES = (1, 4, 8, 16)
_REPEATS = 7
_CONTEXT = 64
_DEPTHS = 4


class Costs(msgspec.Struct, frozen=True):
    """Medians in milliseconds."""

    verify_ms: dict[str, float]
    """m -> T_v(m), the target over m tokens."""
    draft_ms: dict[str, float]
    """B -> T_d(B), one depth of the drafter over B branches."""


class SpeedUpPrediction(msgspec.Struct, frozen=True):
    """The best plan by the formula of speculative speculative decoding."""

    num_draft_tokens: int
    branches: int
    hit_rate: float
    tokens_per_round: float
    speed_up: float
    """Relative to plain decoding."""


def measure(target: LoadedModel, drafter: Path, text: Tokens) -> Costs:
    """Time the pair; the target is modified for it and must not be used afterwards.

    Args:
        text: some tokens of the vocabulary, to be repeated as a context.
    """
    context = (text * _CONTEXT)[:_CONTEXT]
    return Costs(_verify_ms(target, context), _draft_ms(drafter, context))


def _verify_ms(target: LoadedModel, context: Tokens) -> dict[str, float]:
    verifier = Verifier(target, prefill_step_size=_CONTEXT)
    for _ in verifier.handle(OpenSequence(sequence=0, tokens=context, sampling=Sampling())):
        pass
    position, costs = len(context), {}
    # A target that cannot be rewound verifies one token at a time.
    for count in (m for m in CHAINS if m <= 1 + verifier.max_draft_tokens):
        times = []
        for _ in range(_REPEATS):
            chain = [context[0]] * count
            question = Verify(sequence=0, round=0, position=position, nodes=chain)
            for answer in verifier.handle(question):
                if isinstance(answer, VerificationOutcome):
                    times.append(answer.verify_ms)
                    position += answer.accepted + 1
        costs[str(count)] = median(times[1:])
    return costs


def _draft_ms(drafter: Path, context: Tokens) -> dict[str, float]:
    backend = MlxBackend(drafter, prefill_step_size=_CONTEXT, weights="auto")
    for _ in backend.open(0, context, Sampling()):
        pass
    costs = {}
    for count in BRANCHES:
        times = []
        for _ in range(_REPEATS):
            before = None
            for _layer in backend.prepare(0, read_tree([context[0]]), [count], _DEPTHS):
                now = time.perf_counter()
                # The first depth comes with the chain's own forward pass.
                if before is not None:
                    times.append(1e3 * (now - before))
                before = now
        costs[str(count)] = median(times[_DEPTHS:])
    return costs


def predict(figures: Figures, costs: Costs) -> SpeedUpPrediction:
    """Return the fastest (lookahead, branches) for these figures.

    A hit yields E(K) tokens for the longer of verification and preparation; after a miss the target
    continues with one token alone.
    """
    plain = costs.verify_ms["1"]
    alpha = min(figures.greedy_agreement, 0.999)
    best = SpeedUpPrediction(0, 0, 0.0, 1.0, 1.0)
    for chain, verify_ms in costs.verify_ms.items():
        num_draft_tokens = int(chain) - 1
        for branches, draft_ms in costs.draft_ms.items():
            if not num_draft_tokens:
                continue
            width = max(1, int(branches) // (num_draft_tokens + 1))
            rejected = 1 - alpha**num_draft_tokens
            after = _at(figures.hits_after_rejection, width)
            hit = rejected * after + alpha**num_draft_tokens * _at(figures.hits, width)
            tokens = (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)
            prepare_ms = (1 + num_draft_tokens) * draft_ms
            on_hit = max(verify_ms, prepare_ms) / plain
            speed_up = (hit * tokens + 1 - hit) / (hit * on_hit + 1 - hit)
            if speed_up > best.speed_up:
                best = SpeedUpPrediction(num_draft_tokens, int(branches), hit, tokens, speed_up)
    return best


def _at(hits: dict[str, float], width: int) -> float:
    """Return the hit rate at the largest measured width that is not above `width`."""
    return hits[str(max(int(w) for w in hits if int(w) <= width))]
