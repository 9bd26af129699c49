"""Plain decoding without gaps: the next pass starts before this one's tokens have been read.

The chosen tokens stay on the device and feed the next pass there, while this process reads and
reports them. A pass starts ahead only if all open sequences continue with one token each, which the
orchestrator has granted (`Verify.granted`): if one starts, ends or verifies a draft, waiting for a
shared pass is better.
"""

from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx

from protocol.decoding.token_tree import read_tree
from services.engine.forward import Batcher
from services.engine.pass_handle import PassTiming
from services.kv.cache import KVStore
from services.verifier.sequence import TargetSequence


class PassAhead:
    """Starts passes that have not been requested yet.

    Args:
        batcher: builds them.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._followed: PassTiming | None = None
        """The pass that was considered last."""

    def start(self, timing: PassTiming, sequences: Collection[TargetSequence]) -> None:
        """Start the pass after this one, if possible; called once per pass, by its first sequence.

        Args:
            timing: of a running pass, of which nothing has been read.
            sequences: all open sequences.
        """
        if timing is self._followed:
            return
        self._followed = timing
        members = [one for one in sequences if _goes_on(one) and one.passes[0].timing is timing]
        if not len(members) == len(sequences) == timing.sequences or self._batcher.has_waiting:
            return
        members.sort(key=lambda one: one.passes[0].row)
        choice, states = _choose(members), [one.state for one in members]
        if len(members) == 1:
            states[0].commit(states[0].length)  # a chain of one token is always accepted
        elif not all(isinstance(state, KVStore) for state in states):
            return
        missing = [len(one.tokens) + 1 - one.state.length for one in members]
        for handle in self._batcher.follow(choice, states, missing):
            members[handle.row].passes.append(handle)


def _goes_on(sequence: TargetSequence) -> bool:
    """Return True if its current or next pass is of one token and another one follows."""
    request = sequence.request
    granted = request is not None and request.granted > 0 and len(request.nodes) == 1
    return granted and sequence.rule.is_on_device and bool(sequence.passes)


def _choose(members: Sequence[TargetSequence]) -> mx.array:
    """Return the chosen tokens, [sequences], lazy; negative where the host decides."""
    joint = members[0].passes[0].joint
    if joint is not None and all(one.rule.is_likeliest for one in members):
        return joint.lazy
    choices = []
    for one in members:
        if one.request is not None:
            tree, head = read_tree(one.request.nodes, []), one.passes[0]
            choice: Any = one.rule.begin(head.logits, one.request, tree)
            head.choice = choice
            choices.append(choice)
    return mx.concatenate(choices)
