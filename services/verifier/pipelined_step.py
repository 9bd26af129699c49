"""Plain decoding without a pause: the next pass begins before its token has been read.

The chosen token stays on the device and is fed to the next pass there, while this process
reads it and sends it. The orchestrator says when that pays (`Verify.granted`): a chain with a
draft in it cannot be foreseen, and would have to wait for a pass that is not wanted.
"""

from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from protocol.messages import Tokens, VerificationOutcome, Verify
from services.kv.state import SequenceState


def next_plain(message: Verify, outcome: VerificationOutcome) -> Verify | None:
    """What the orchestrator would ask for next: the bonus token alone, if it has been granted."""
    if not outcome.goes_on:
        return None
    return replace(
        message,
        round=message.round + 1,
        position=message.position + outcome.accepted + 1,
        nodes=[outcome.bonus],
        parents=[],
        distributions=[],
        granted=message.granted - 1,
    )


class PipelinedStep:
    """A pass over one token that was not asked for yet.

    Args:
        model: called on the token.
        state: of the sequence; it stays what it was until the pass is taken up.
        choice: [1] of `sampling.device.begin`, after the last token in the state; the pass is
            discarded if it is not a token.
    """

    def __init__(self, model: Any, state: SequenceState, choice: mx.array) -> None:
        start: Any = mx.async_eval
        self._state = state
        self._token = mx.maximum(choice, 0)
        # Before the pass is built, so that reading it waits for nothing behind it.
        start(choice, self._token)
        length = state.length
        state.append(1)
        try:
            self._logits: mx.array = model(self._token[None], cache=state.caches)[0]
        except BaseException:
            state.commit(length)
            raise
        self._suspended = state.suspend()
        start(self._logits)

    def take_up(self, chain: Tokens) -> mx.array | None:
        """[1, vocabulary] logits of this chain, whose pass is then in work; None if not run."""
        token: Any = self._token.item()
        if chain != [token]:
            return None
        self._state.resume(self._suspended)
        return self._logits
