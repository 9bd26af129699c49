"""Logits at chosen positions, and the target's distribution there.

Most of a small drafter's cost is its head, and most positions of a batch are not trained, so the
head is computed only at those that are.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from protocol.errors import ModelError
from services.mlx.taps import Taps

Weights = dict[str, mx.array]
"""Parameters by their path in the model."""


def number(array: mx.array) -> float:
    """Return the value of an array of one element; waits for the device."""
    value: Any = array.item()
    return float(value)


class _At:
    """Wraps a model's body to return hidden states at some positions only."""

    def __init__(self, body: Any, positions: mx.array) -> None:
        self._body = body
        self._positions = positions

    def __call__(self, *arguments: Any, **named: Any) -> mx.array:
        hidden = self._body(*arguments, **named)
        chosen: mx.array = hidden.reshape(-1, hidden.shape[-1])[self._positions]
        return chosen[None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


def check_layout(model: Any) -> None:
    """Raise ModelError unless the model has its decoder in `model.model.layers`."""
    body: Any = getattr(model, "model", None)
    if body is None or not hasattr(body, "layers") or not hasattr(body, "embed_tokens"):
        kind = getattr(model, "model_type", type(model).__name__)
        raise ModelError(f"models of type {kind!r} cannot be distilled: no model.layers in them")


def logits_at(model: Any, tokens: mx.array, positions: mx.array, cache: Any = None) -> mx.array:
    """Return an mlx-lm model's predictions after some of the tokens.

    A family's own code around its head (soft-capping, scaling) is applied.

    Args:
        tokens: [rows, length].
        positions: [count] flat indices into rows * length.
        cache: the model's cache argument; by default none.

    Returns:
        [count, head] float32 logits.
    """
    body = model.model
    model.model = _At(body, positions)
    try:
        logits: mx.array = model(tokens, cache=cache)
    finally:
        model.model = body
    return logits[0].astype(mx.float32)


class TargetDistribution:
    """The target's distribution over the tokens in the drafter's head."""

    def __init__(
        self,
        model: Any,
        vocabulary: int,
        head_ids: mx.array | None,
        layers: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._taps = Taps(model, layers) if layers else None
        self._vocabulary = vocabulary
        self._head_ids = head_ids

    def logits(self, tokens: mx.array, positions: mx.array) -> mx.array:
        """Return [count, vocabulary] float32 logits."""
        return logits_at(self._model, tokens, positions)[:, : self._vocabulary]

    def logits_and_features(
        self, tokens: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Return `logits`, and [rows, length, features] of the tapped layers, if any."""
        logits = self.logits(tokens, positions)
        return logits, None if self._taps is None else self._taps.features()

    def close(self) -> None:
        """Restore the model."""
        if self._taps is not None:
            self._taps.remove()

    def probabilities(self, logits: mx.array, temperature: float) -> mx.array:
        """Return [count, head] probabilities; a trimmed head's need not sum to 1."""
        distribution = mx.softmax(logits / temperature, axis=-1, precise=True)
        return (
            distribution
            if self._head_ids is None
            else mx.take(distribution, self._head_ids, axis=-1)
        )

    def ids_of(self, columns: mx.array) -> mx.array:
        """Return the token ids of these columns of the drafter's head."""
        return columns if self._head_ids is None else self._head_ids[columns]
