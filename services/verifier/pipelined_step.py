"""Plain decoding without a pause: the next pass begins before its token has been read.

The chosen token stays on the device and is fed to the next pass there, while this process
reads it and the orchestrator answers. The orchestrator says when that pays
(`Verify.pipelined`): a chain with a draft in it cannot be foreseen, and would have to wait
for a pass that nobody wants.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from protocol.messages import Tokens
from services.kv.cache import KVStore


class PipelinedStep:
    """A pass over one token that nobody has asked for yet.

    Args:
        model: called on the token.
        caches: of the sequence, whose tokens are in `store`.
        store: keeps its length; the token's KV lies behind it, where the next pass writes.
        choice: [1] of `sampling.device.begin`, after the last token in the store; the pass is
            discarded if it is not a token.
    """

    def __init__(self, model: Any, caches: Sequence[Any], store: KVStore, choice: mx.array) -> None:
        start: Any = mx.async_eval
        self._token = mx.maximum(choice, 0)
        # Before the pass is built, so that reading it waits for nothing behind it.
        start(choice, self._token)
        length = store.length
        store.chain(1)
        try:
            self._logits: mx.array = model(self._token[None], cache=caches)[0]
        finally:
            store.trim(length)
        start(self._logits)

    def logits(self, chain: Tokens) -> mx.array | None:
        """[1, vocabulary] logits of this chain, perhaps still in the making; None if not run."""
        token: Any = self._token.item()
        return self._logits if chain == [token] else None
