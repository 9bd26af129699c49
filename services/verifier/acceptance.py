"""What becomes of a tree of drafts: logits in; which path stands, and the bonus token, out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.decoding.rejection import verify_draft
from protocol.decoding.sampler import Floats, sample
from protocol.decoding.sampling_params import is_greedy, uses_rejection
from protocol.decoding.token_tree import TokenTree
from protocol.errors import ProtocolError
from protocol.messages import OpenSequence, TokenLogprobs, Tokens, VerificationOutcome, Verify
from services.batching.forward import ForwardPass
from services.mlx.loader import compute_unit
from services.sampling import device


class AcceptanceResult(NamedTuple):
    """An outcome."""

    rows: list[int]
    """Of the tree: those that stand, from the pending token's on."""
    bonus: int
    logprobs: list[TokenLogprobs]
    """Of the accepted tokens and the bonus token, if asked for."""


class AcceptanceRule:
    """Decides which path of a tree stands, for the trees of one sequence.

    Args:
        opened: the sequence.
        folder: of the target model.
    """

    def __init__(self, opened: OpenSequence, folder: Path) -> None:
        self._sampling = opened.sampling
        shape = opened.sampling.logits_options
        self._processor = None if shape is None else LogitsProcessor(shape, folder, opened.tokens)

    def check(self, message: Verify, tree: TokenTree) -> None:
        """Raise ProtocolError if the rule does not judge such trees.

        Under the rejection rule a draft token stands or falls by itself, whatever else was
        drafted in its place; that the output follows p is proved for chains only.
        """
        if uses_rejection(self._sampling) and not tree.is_chain:
            raise ProtocolError("the rejection rule judges chains, not trees")
        if len(message.distributions) not in (0, len(tree) - 1):
            raise ProtocolError(
                f"{len(message.distributions)} distributions for {len(tree) - 1} draft tokens"
            )

    def drop_impossible(self, message: Verify, tree: TokenTree) -> TokenTree:
        """The tree without the draft tokens that the request's shape rules out.

        They would be rejected, and the rows before them draw the same bonus token without
        them. A token that was drawn stays: its rejection changes that distribution
        (`protocol.decoding.rejection`).
        """
        if self._processor is None or len(tree) == 1:
            return tree
        possible = [0]
        for row in range(1, len(tree)):
            if tree.parents[row - 1] in possible and self._allows(message, tree, row):
                possible.append(row)
        return tree if len(possible) == len(tree) else tree.keep(possible)

    def _allows(self, message: Verify, tree: TokenTree, row: int) -> bool:
        if self._processor is None or (
            message.distributions and message.distributions[row - 1].tokens
        ):
            return True
        *before, token = tree.tokens_to(row)
        return self._processor.count_allowed(before, [token]) == 1

    @property
    def is_likeliest(self) -> bool:
        """Whether the choice is the likeliest token as it comes."""
        return is_greedy(self._sampling) and self.is_on_device

    @property
    def is_on_device(self) -> bool:
        """Whether the choice is made where the logits are."""
        if self._processor is not None or self._sampling.logprobs is not None:
            return False
        return is_greedy(self._sampling) or not (
            compute_unit() == "cpu" or uses_rejection(self._sampling)
        )

    def begin(
        self,
        logits: mx.array,
        message: Verify,
        tree: TokenTree,
        best: Callable[[], npt.NDArray[np.int32]] | None = None,
    ) -> mx.array | npt.NDArray[np.int32] | None:
        """The target's own choice after each row, [rows], perhaps still in the making.

        None where the rows must be looked at on the host. See `accept` for the arguments, and
        `device.begin`; `best` gives the likeliest tokens if they are found for others too.
        """
        if not self.is_on_device:
            return None
        if best is not None and self.is_likeliest:
            return best()
        return device.begin(logits, _positions(message, tree), self._sampling)

    def accept(
        self,
        logits: mx.array,
        message: Verify,
        tree: TokenTree,
        begun: mx.array | npt.NDArray[np.int32] | None,
    ) -> AcceptanceResult:
        """Which rows of the tree stand, and the bonus token.

        Args:
            logits: [rows, vocabulary], possibly not computed yet.
            message: what was asked.
            tree: as much of it as is judged; it follows the tokens judged so far.
            begun: what `begin` made of them.

        Raises:
            RuntimeFailure: a logit is NaN.
        """
        if begun is not None:
            chosen = device.finish(begun, logits, _positions(message, tree), self._sampling)
            stands = tree.walk(chosen)
            return AcceptanceResult(stands, chosen[stands[-1]], [])
        device.check_finite(logits)
        rows = host_floats(logits)
        if uses_rejection(self._sampling):
            judged = self._reject(rows, message, tree)
        else:
            judged = self._walk(rows, message, tree)
        if self._processor is not None:
            self._processor.rewind(message.position + len(judged.rows))
        if self._sampling.logprobs is None:
            return judged
        emitted = [*(tree.tokens[row] for row in judged.rows[1:]), judged.bonus]
        found = logprobs(rows[judged.rows], emitted, self._sampling.logprobs)
        return judged._replace(logprobs=found)

    def _walk(self, rows: Floats, message: Verify, tree: TokenTree) -> AcceptanceResult:
        """Coupled: from row to row, as far as the target's own token is a child.

        Only rows that stand are looked at: what shapes their logits has seen their path alone.
        """
        stands = [0]
        while True:
            row = stands[-1]
            shaped = process_rows(self._processor, [tree.tokens[row]], rows[row : row + 1])
            [chosen] = sample(shaped, [message.position + len(stands)], self._sampling)
            child = tree.children[row].get(chosen)
            if child is None:
                return AcceptanceResult(stands, chosen, [])
            stands.append(child)

    def _reject(self, rows: Floats, message: Verify, tree: TokenTree) -> AcceptanceResult:
        """The rejection rule, of a chain."""
        shaped = process_rows(self._processor, tree.tokens, rows)
        draft, sent = tree.tokens[1:], message.distributions[: len(tree) - 1]
        accepted, bonus = verify_draft(shaped, draft, sent, message.position + 1, self._sampling)
        return AcceptanceResult(list(range(accepted + 1)), bonus, [])


def _positions(message: Verify, tree: TokenTree) -> list[int]:
    """Of the tokens that are chosen after each token of the tree."""
    return [message.position + 1 + depth for depth in tree.depths]


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


def describe_outcome(
    message: Verify, judged: AcceptanceResult, by: ForwardPass, node: int | None
) -> VerificationOutcome:
    """What became of a message, in this pass.

    Args:
        node: of a tree, the row of what was asked for that the last token that stands has.
    """
    return VerificationOutcome(
        sequence=message.sequence,
        round=message.round,
        accepted=len(judged.rows) - 1,
        bonus=judged.bonus,
        goes_on=message.granted > 0 and judged.bonus not in message.stop_ids,
        node=node,
        logprobs=judged.logprobs,
        verify_ms=1e3 * (by.ended - by.started),
        at_ns=round(1e9 * by.ended),  # perf_counter and monotonic are one clock here
        idle_ms=1e3 * by.waited,
        sequences=by.sequences,
        rows=by.rows,
    )
