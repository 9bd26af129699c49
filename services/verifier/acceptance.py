"""What becomes of a chain: the target's logits in, accepted tokens and the bonus token out."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.decoding.rejection import verify_draft
from protocol.decoding.sampler import Floats, sample
from protocol.decoding.sampling_params import is_greedy, uses_rejection
from protocol.messages import OpenSequence, TokenLogprobs, Tokens, Verify
from services.mlx.loader import compute_unit
from services.sampling import device


class AcceptanceResult(NamedTuple):
    """An outcome."""

    accepted: int
    bonus: int
    logprobs: list[TokenLogprobs]
    """Of the accepted tokens and the bonus token, if asked for."""


class AcceptanceRule:
    """Decides how much of a chain stands, for the chains of one sequence.

    Args:
        opened: the sequence.
        folder: of the target model.
    """

    def __init__(self, opened: OpenSequence, folder: Path) -> None:
        self._sampling = opened.sampling
        shape = opened.sampling.logits_options
        self._processor = None if shape is None else LogitsProcessor(shape, folder, opened.tokens)

    def drop_impossible(self, message: Verify) -> Verify:
        """The chain up to the first draft token that the request's shape rules out.

        It would be rejected, and the row before it draws the same bonus token without it. A
        token that was drawn stays: its rejection changes that distribution
        (`protocol.decoding.rejection`).
        """
        if self._processor is None:
            return message
        pending, *draft = message.chain
        possible = self._processor.count_allowed([pending], draft)
        if possible == len(draft) or (
            message.distributions and message.distributions[possible].tokens
        ):
            return message
        return replace(
            message,
            chain=[pending, *draft[:possible]],
            distributions=message.distributions[:possible],
        )

    def begin(self, logits: mx.array, message: Verify) -> mx.array | None:
        """The target's own choice after each row, [chain], perhaps still in the making.

        None where the rows must be looked at on the host. See `accept` for the arguments, and
        `device.begin`.
        """
        if self._processor is not None or self._sampling.logprobs is not None:
            return None
        if not is_greedy(self._sampling) and (
            compute_unit() == "cpu" or uses_rejection(self._sampling)
        ):
            return None
        return device.begin(logits, _positions(message), self._sampling)

    def accept(self, logits: mx.array, message: Verify, begun: mx.array | None) -> AcceptanceResult:
        """How many draft tokens of the chain stand, and the bonus token.

        Args:
            logits: [chain, vocabulary], possibly not computed yet.
            message: the chain, which follows the tokens judged so far.
            begun: what `begin` made of them.

        Raises:
            RuntimeFailure: a logit is NaN.
        """
        if begun is not None:
            chosen = device.finish(begun, logits, _positions(message), self._sampling)
            return self._compare(chosen, message)
        device.check_finite(logits)
        rows = host_floats(logits)
        judgement = self._draw(process_rows(self._processor, message.chain, rows), message)
        emitted = [*message.chain[1 : judgement.accepted + 1], judgement.bonus]
        if self._processor is not None:
            self._processor.rewind(message.position + judgement.accepted + 1)
        if self._sampling.logprobs is None:
            return judgement
        return judgement._replace(logprobs=logprobs(rows, emitted, self._sampling.logprobs))

    def _draw(self, rows: Floats, message: Verify) -> AcceptanceResult:
        draft, first = message.chain[1:], message.position + 1
        if uses_rejection(self._sampling):
            accepted, bonus = verify_draft(
                rows, draft, message.distributions, first, self._sampling
            )
            return AcceptanceResult(accepted, bonus, [])
        return self._compare(sample(rows, _positions(message), self._sampling), message)

    @staticmethod
    def _compare(chosen: Tokens, message: Verify) -> AcceptanceResult:
        accepted = count_accepted(message.chain[1:], chosen)
        return AcceptanceResult(accepted, chosen[accepted], [])


def _positions(message: Verify) -> range:
    """Of the tokens that are chosen after each token of the chain."""
    first = message.position + 1
    return range(first, first + len(message.chain))


def count_accepted(draft: Tokens, chosen: Tokens) -> int:
    """How many draft tokens equal the target's own choice, counted from the first (k)."""
    for index, (drafted, target) in enumerate(zip(draft, chosen, strict=False)):
        if drafted != target:
            return index
    return len(draft)


def logprobs(rows: Floats, tokens: Tokens, best: int) -> list[TokenLogprobs]:
    """The target's own log-probabilities: at temperature 1, before any bias, penalty or filter.

    Args:
        rows: [at least as many as tokens, vocabulary] logits before each token.
        tokens: what was emitted.
        best: how many of the likeliest tokens to report beside each.
    """
    found = []
    for row, token in zip(rows, tokens, strict=False):
        exact = row.astype(np.float64)
        peak = exact.max()
        total = peak + np.log(np.exp(exact - peak).sum())
        top: Any = np.argpartition(-exact, best)[:best] if best else []
        ranked = sorted((int(t) for t in top), key=lambda t: (-exact[t], t))
        pairs = [(t, float(exact[t] - total)) for t in ranked]
        found.append(TokenLogprobs(float(exact[token] - total), pairs))
    return found


def host_floats(array: mx.array) -> npt.NDArray[np.float32]:
    """The array as numpy float32, without a copy where the memory is shared."""
    return np.array(array.astype(mx.float32), copy=False)
