"""Acceptance of a tree of drafts: logits in; the accepted path and the bonus token out."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.decoding.sampler import Floats, sample
from protocol.decoding.sampling_params import goes_beyond, is_greedy, uses_rejection
from protocol.decoding.token_tree import TokenTree
from protocol.errors import ProtocolError
from protocol.messages import OpenSequence, TokenLogprobs, Tokens, VerificationOutcome, Verify
from services.engine.pass_handle import Ids, PassTiming
from services.kernels.register import kernels
from services.sampling import device


class AcceptanceResult(NamedTuple):
    """The result of a verification."""

    rows: list[int]
    """Accepted rows of the tree, from the pending token's on."""
    bonus: int
    logprobs: list[TokenLogprobs]
    """Of the accepted tokens and the bonus token, if requested."""


class AcceptanceRule:
    """Decides which path of a tree is accepted, for the trees of one sequence.

    Args:
        opened: the sequence.
        folder: of the target model.
    """

    def __init__(self, opened: OpenSequence, folder: Path) -> None:
        self._sampling = opened.sampling
        shape = opened.sampling.logits_options
        self._processor = None if shape is None else LogitsProcessor(shape, folder, opened.tokens)
        greedy = is_greedy(self._sampling)
        self._rejects = uses_rejection(self._sampling)
        on_host = not kernels().on_gpu or self._rejects
        on_logits = not goes_beyond(self._sampling, device.APPLIED)
        is_plain = on_logits and shape is None and self._sampling.logprobs is None
        self.is_on_device = is_plain and (greedy or not on_host)
        """True if the choice is made on the logits' device."""
        self.is_likeliest = is_plain and greedy
        """True if the choice is the argmax of the unprocessed logits."""

    def check(self, message: Verify, tree: TokenTree) -> None:
        """Raise ProtocolError if the rule does not support such trees.

        Under the rejection rule a draft token is accepted or rejected on its own, whatever else was
        drafted in its place; that the output follows p is proved for chains only.
        """
        if self._rejects and not tree.is_chain:
            raise ProtocolError("the rejection rule takes chains, not trees")
        if len(message.distributions) not in (0, len(tree) - 1):
            raise ProtocolError(
                f"{len(message.distributions)} distributions for {len(tree) - 1} draft tokens"
            )

    def drop_impossible(self, message: Verify, tree: TokenTree) -> TokenTree:
        """Return the tree without the draft tokens that the request's constraints rule out.

        They would be rejected, and the rows before them draw the same bonus token without them. A
        token that was drawn stays: its rejection changes that distribution
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

    def begin(self, logits: mx.array, message: Verify, tree: TokenTree) -> mx.array | None:
        """Return the target's own choice after each row, [rows], lazy.

        Returns None if the rows must be processed on the host. For the arguments see `accept` and
        `device.begin`.
        """
        if not self.is_on_device:
            return None
        return device.begin(logits, _positions(message, tree), self._sampling)

    def accept(
        self,
        logits: mx.array,
        message: Verify,
        tree: TokenTree,
        tokens: Ids | None,
    ) -> AcceptanceResult:
        """Return the accepted rows of the tree, and the bonus token.

        Args:
            logits: [rows, vocabulary], possibly lazy.
            message: the request.
            tree: the part that is verified; it follows the tokens accepted so far.
            tokens: result of `begin` for them, on the host.

        Raises:
            RuntimeFailure: a logit is NaN.
        """
        if tokens is not None:
            chosen = tokens.tolist()
            if min(chosen) < 0:
                chosen = device.finish(tokens, logits, _positions(message, tree), self._sampling)
            accepted = tree.walk(chosen)
            return AcceptanceResult(accepted, chosen[accepted[-1]], [])
        device.check_finite(logits)
        rows = host_floats(logits)
        if self._rejects:
            judged = self._reject(rows, message, tree)
        else:
            judged = self._walk(rows, message, tree)
        if self._processor is not None:
            self._processor.rewind(message.position + len(judged.rows))
        if self._sampling.logprobs is None:
            return judged
        emitted = [*(tree.tokens[row] for row in judged.rows[1:]), judged.bonus]
        entries = logprobs(rows[judged.rows], emitted, self._sampling.logprobs)
        return judged._replace(logprobs=entries)

    def _walk(self, rows: Floats, message: Verify, tree: TokenTree) -> AcceptanceResult:
        """Apply the coupled rule: walk down as long as the target's own token is a child.

        Only accepted rows are processed: the state that shapes their logits has seen their path
        alone.
        """
        accepted = [0]
        while True:
            row = accepted[-1]
            shaped = process_rows(self._processor, [tree.tokens[row]], rows[row : row + 1])
            [chosen] = sample(shaped, [message.position + len(accepted)], self._sampling)
            child = tree.children[row].get(chosen)
            if child is None:
                return AcceptanceResult(accepted, chosen, [])
            accepted.append(child)

    def _reject(self, rows: Floats, message: Verify, tree: TokenTree) -> AcceptanceResult:
        """Apply the rejection rule to a chain."""
        from protocol.decoding.rejection import verify_draft  # noqa: PLC0415

        shaped = process_rows(self._processor, tree.tokens, rows)
        draft, sent = tree.tokens[1:], message.distributions[: len(tree) - 1]
        accepted, bonus = verify_draft(shaped, draft, sent, message.position + 1, self._sampling)
        return AcceptanceResult(list(range(accepted + 1)), bonus, [])


def _positions(message: Verify, tree: TokenTree) -> list[int]:
    """Return the positions of the tokens that are chosen after each token of the tree."""
    return [message.position + 1 + depth for depth in tree.depths]


def logprobs(rows: Floats, tokens: Tokens, best: int) -> list[TokenLogprobs]:
    """Return the target's own log-probabilities, without temperature, bias, penalty or filter.

    Args:
        rows: [at least as many as tokens, vocabulary] logits before each token.
        tokens: the generated tokens.
        best: how many of the most probable tokens to report for each.
    """
    entries = []
    for row, token in zip(rows, tokens, strict=False):
        exact = row.astype(np.float64)
        peak = exact.max()
        total = peak + np.log(np.exp(exact - peak).sum())
        top: Any = np.argpartition(-exact, best)[:best] if best else []
        ranked = sorted((int(t) for t in top), key=lambda t: (-exact[t], t))
        pairs = [(t, float(exact[t] - total)) for t in ranked]
        entries.append(TokenLogprobs(float(exact[token] - total), pairs))
    return entries


def host_floats(array: mx.array) -> npt.NDArray[np.float32]:
    """Return the array as numpy float32, without a copy where the memory is shared."""
    return np.array(array.astype(mx.float32), copy=False)


def describe_outcome(
    message: Verify, judged: AcceptanceResult, timing: PassTiming, node: int | None
) -> VerificationOutcome:
    """Describe the outcome of a message in this pass.

    Args:
        node: for a tree, the requested row of the last accepted token.
    """
    return VerificationOutcome(
        sequence=message.sequence,
        round=message.round,
        accepted=len(judged.rows) - 1,
        bonus=judged.bonus,
        goes_on=message.granted > 0 and judged.bonus not in message.stop_ids,
        node=node,
        logprobs=judged.logprobs,
        verify_ms=1e3 * (timing.ended - timing.started),
        at_ns=round(1e9 * timing.ended),  # perf_counter and monotonic are one clock here
        idle_ms=1e3 * timing.waited,
        sequences=timing.sequences,
        rows=timing.rows,
    )
