"""The backend of drafters whose input is the target's last state.

Its last cache holds, per token, the addition to the embedding of the next token: from the target's
state where that arrived, otherwise from the drafter's own output. If no state ever arrived, nothing
is added to any token, and the drafter is the plain model in its folder. The chain under
verification is fed token by token, and branches as usual.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from protocol.messages import Tokens
from protocol.settings import DraftWeights
from services.drafter.backends.mlx_reading import ReadingBackend, read_target
from services.drafter.backends.mlx_tree import Trunk
from services.kv.cache import KVStore
from services.mlx.lm_head import trim_head
from services.mlx.loader import compute_unit, load
from services.mlx.target_reader import TargetReader, add_to_embeddings


class SelfFeedingDrafter(nn.Module):
    """The drafter in the form of a model for tree drafting.

    Args:
        drafter: an mlx-lm model.
        reader: of its folder.
    """

    def __init__(self, drafter: Any, reader: TargetReader) -> None:
        super().__init__()
        self.drafter = drafter
        self.reader = reader

    @property
    def layers(self) -> list[Any]:
        """The drafter's layers."""
        layers: list[Any] = self.drafter.layers
        return layers

    def make_cache(self) -> list[Any]:
        """Return one cache for each layer, and one for the additions to the next tokens."""
        return [*make_prompt_cache(self.drafter), KVCache()]  # type: ignore[no-untyped-call]

    def rows(self, states: mx.array, offset: int) -> list[tuple[mx.array, mx.array]]:
        """Return the cache rows of tokens whose states are known, [1, tokens, features]."""
        rows = self.reader.rows(self.drafter, states, offset)
        return [*rows, _as_rows(self.reader.after_state(states))]

    def inputs_of(self, store: KVStore) -> Callable[[], mx.array]:
        """Return the additions in the pass that starts on this store, once its span is set."""
        return partial(self._find_inputs, store)

    def _find_inputs(self, store: KVStore) -> mx.array:
        """Return [1, rows, width]. Rows of a chain that are fed at once are read without states."""
        span, given = store.span, store.caches[-1].keys
        if given is None or not span.start or (span.visible is None and span.count > 1):
            return self._add_nothing(1, span.count)
        return mx.take(given[:, 0], mx.array(span.parent_slots), axis=1)

    def _add_nothing(self, rows: int, count: int) -> mx.array:
        weight = self.reader.from_own.proj.weight
        return mx.zeros((rows, count, weight.shape[0]), weight.dtype)

    def __call__(
        self, tokens: mx.array, cache: list[Any], states: mx.array | None = None
    ) -> mx.array:
        """Return [1, tokens, head] logits; `states` are the additions, [1, tokens, width]."""
        added = self._add_nothing(*tokens.shape) if states is None else states
        with add_to_embeddings(self.drafter, added):
            logits, output = _run(self.drafter, tokens, cache[:-1])
        behind_state = mx.any(added != 0, axis=-1, keepdims=True)
        passed_on = mx.where(behind_state, self.reader.after_own(output), 0)
        cache[-1].update_and_fetch(*_as_rows(passed_on))
        return logits


class SelfFeedingBackend(ReadingBackend):
    """Draft backend that feeds its own states; see `base.DraftBackend` and `base.TargetReading`."""

    _feeds_by_depth = True
    _model: SelfFeedingDrafter

    def __init__(
        self,
        folder: Path,
        prefill_step_size: int,
        unit: str = "",
        *,
        weights: DraftWeights = "float",
    ) -> None:
        loaded = load(folder, as_stored=True)
        head_ids = trim_head(loaded.module, folder)
        on_cpu = compute_unit() == "cpu"
        dtype = mx.float32 if on_cpu else loaded.module.model.norm.weight.dtype
        reading = read_target(folder, dtype)
        module = SelfFeedingDrafter(loaded.module, reading.reader)
        reading = reading._replace(loaded=loaded._replace(module=module))
        super().__init__(folder, prefill_step_size, unit, weights=weights, reading=reading)
        if head_ids is not None:
            self._head_ids, self._head_size = head_ids, len(head_ids)

    def _equip(self, weights: DraftWeights) -> None:
        """Optimise the drafter itself; see `MlxBackend`."""
        feeding, self._model = self._model, self._model.drafter
        super()._equip(weights)
        self._model = feeding

    def _make_rows(self, states: mx.array, first: int) -> list[tuple[mx.array, mx.array]]:
        return self._model.rows(states, first)

    def _append(self, trunk: Trunk, tokens: Tokens, width: int) -> None:
        """Append tokens one by one, since each needs the output of the one before."""
        if not width:
            super()._append(trunk, tokens, width)
            return
        for token in tokens:
            super()._append(trunk, [token], width)

    def _inputs(self, trunk: Trunk) -> Callable[[], mx.array]:
        """Return the additions to the fed tokens; see `MlxBackend`."""
        if not isinstance(trunk.store, KVStore):
            raise TypeError("the trunk does not belong to this backend")
        return self._model.inputs_of(trunk.store)


class _Body:
    """Wraps a model's body, and keeps its result."""

    output: mx.array

    def __init__(self, body: Any) -> None:
        self._body = body

    def __call__(self, *arguments: Any, **named: Any) -> mx.array:
        self.output = self._body(*arguments, **named)
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


def _run(model: Any, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
    """Return logits and the body's output, from which the head made them."""
    body = model.model
    model.model = kept = _Body(body)
    try:
        logits: mx.array = model(tokens, cache=cache)
    finally:
        model.model = body
    return logits, kept.output


def _as_rows(added: mx.array) -> tuple[mx.array, mx.array]:
    """Return [1, tokens, width] as the keys of one head, with unused values."""
    rows = added[:, None]
    return rows, rows[..., :1]
