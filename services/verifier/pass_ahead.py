"""Plain decoding without gaps: the next pass starts before this one's tokens have been read.

The chosen tokens stay on the device and feed the next pass there, while this process reads and
reports them. A pass starts ahead only if all open sequences continue with one token each, which the
orchestrator has granted (`Verify.granted`): if one starts, ends or verifies a draft, waiting for a
shared pass is better.
"""

import logging
from collections.abc import Collection
from functools import cache
from typing import Any

import mlx.core as mx

from protocol.decoding.token_tree import read_tree
from services.batching.forward import Batcher, ForwardPass
from services.kv.cache import KVStore
from services.mlx.launching import launch
from services.verifier.pipelined_step import PipelinedStep, SharedStep
from services.verifier.sequence import TargetSequence

_log = logging.getLogger(__name__)


class PassAhead:
    """Starts passes that have not been requested yet.

    Args:
        batcher: builds them.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._followed: ForwardPass | None = None
        """The pass that was considered last."""

    def start(self, by: ForwardPass, sequences: Collection[TargetSequence]) -> None:
        """Start the pass after `by`, if possible; called once per pass, by its first sequence.

        Args:
            by: a running pass, of which nothing has been read.
            sequences: all open sequences.
        """
        if by is self._followed:
            return
        self._followed = by
        rows = {one.row_in(by): one for one in sequences if _goes_on(one)}
        everybody = len(rows) == len(sequences) == by.sequences and None not in rows
        if not everybody or self._batcher.has_waiting:
            return
        members = [rows[row] for row in sorted(row for row in rows if row is not None)]
        choice = _choose(by, members)
        if len(members) == 1:
            [alone] = members
            alone.state.commit(alone.state.length)  # a chain of one token is always accepted
            alone.ahead.append(PipelinedStep(self._batcher, alone.state, choice))
        elif all(isinstance(one.state, KVStore) for one in members):
            self._start_shared(members, choice)

    def _start_shared(self, members: list[TargetSequence], choice: mx.array) -> None:
        """Start a shared pass; states of slots can be anywhere in it, so they are restored."""
        token: Any = mx.maximum(choice, 0)
        # Before the pass is built, so that reading them does not wait for later work.
        launch(choice, token)
        lengths = [one.state.length for one in members]
        try:
            under_way = [len(one.ahead) for one in members]
            logits, after = self._batcher.begin(token, [one.state for one in members], under_way)
            tokens = after.choose()
        # An error occurs again, and is reported, when the pass is requested.
        except Exception as error:  # noqa: BLE001
            _log.info("no pass of %d sequences begins ahead: %s", len(members), error)
            return
        finally:
            for one, length in zip(members, lengths, strict=True):
                one.state.commit(length)
        read = cache(token.tolist)
        for row, one in enumerate(members):
            own = logits[row : row + 1]
            one.ahead.append(SharedStep(after, row, one.state, read, own))
        launch(tokens)


def _goes_on(sequence: TargetSequence) -> bool:
    """Return True if its current or next pass is of one token and another one follows."""
    asked = sequence.asked
    granted = asked is not None and asked.granted > 0 and len(asked.nodes) == 1
    return granted and sequence.rule.is_on_device


def _choose(by: ForwardPass, members: list[TargetSequence]) -> mx.array:
    """Return the chosen tokens, [sequences], lazy; negative where the host decides."""
    if len(members) > 1 and all(one.rule.is_likeliest for one in members):
        return by.choose()
    choices = []
    for one in members:
        if one.asked is not None and (logits := one.logits_in(by)) is not None:
            choice: Any = one.rule.begin(logits, one.asked, read_tree(one.asked.nodes, []))
            one.begun = choice
            choices.append(choice)
    return mx.concatenate(choices)
