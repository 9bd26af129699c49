"""Logits at chosen positions, and the target's distribution there.

Most of a small drafter's cost is its head, and most positions of a batch are not trained, so the
head is computed only at those that are.
"""

from typing import Any

import mlx.core as mx

from protocol.errors import ModelError

Weights = dict[str, mx.array]
"""Parameters by their path in the model."""

MOST_LOGITS = 1 << 28
"""Numbers of a chunk of the target's logits: 1 GiB."""


def number(array: mx.array) -> float:
    """Return the value of an array of one element; waits for the device."""
    value: Any = array.item()
    return float(value)


class _Given:
    """Wraps a model's body to return given hidden states, so that a call runs its head alone."""

    def __init__(self, body: Any, hidden: mx.array) -> None:
        self._body = body
        self._hidden = hidden

    def __call__(self, *arguments: Any, **named: Any) -> mx.array:
        del arguments, named
        return self._hidden[None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


def check_layout(model: Any) -> None:
    """Raise ModelError unless the model has its decoder in `model.model.layers`."""
    body: Any = getattr(model, "model", None)
    if body is None or not hasattr(body, "layers") or not hasattr(body, "embed_tokens"):
        kind = getattr(model, "model_type", type(model).__name__)
        raise ModelError(f"models of type {kind!r} cannot be distilled: no model.layers in them")


def read_hidden(model: Any, tokens: mx.array, positions: mx.array) -> mx.array:
    """Return [count, width], an mlx-lm model's last hidden states at some of the tokens.

    Args:
        tokens: [rows, length].
        positions: [count] flat indices into rows * length.
    """
    hidden: mx.array = model.model(tokens, cache=None)
    return hidden.reshape(-1, hidden.shape[-1])[positions]


def apply_head(model: Any, hidden: mx.array) -> mx.array:
    """Return [count, head] float32 logits of these hidden states.

    A family's own code around its head (soft-capping, scaling) is applied.
    """
    body = model.model
    model.model = _Given(body, hidden)
    try:
        logits: mx.array = model(mx.zeros((1, hidden.shape[0]), dtype=mx.int32))
    finally:
        model.model = body
    return logits[0].astype(mx.float32)


def logits_at(model: Any, tokens: mx.array, positions: mx.array) -> mx.array:
    """Return [count, head] float32, a model's predictions at some of the tokens: `read_hidden`."""
    return apply_head(model, read_hidden(model, tokens, positions))


class TargetDistribution:
    """The target's distribution over the tokens in the drafter's head."""

    def __init__(self, model: Any, vocabulary: int, head_ids: mx.array | None) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._head_ids = head_ids

    def read_hidden(self, tokens: mx.array, positions: mx.array) -> mx.array:
        """Return the model's last hidden states; see `read_hidden`."""
        return read_hidden(self._model, tokens, positions)

    def split(self, count: int) -> list[slice]:
        """Return the parts in which the logits of `count` positions are computed.

        With a vocabulary of 150,000 those of a whole batch take as much memory as a large model.
        """
        size = max(1, MOST_LOGITS // self._vocabulary)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def logits(self, hidden: mx.array) -> mx.array:
        """Return [count, vocabulary] float32 logits."""
        return apply_head(self._model, hidden)[:, : self._vocabulary]

    def compute_probabilities(self, hidden: mx.array, temperature: float) -> mx.array:
        """Return the `probabilities` of these hidden states, chunk by chunk."""
        parts: list[mx.array] = []
        for chunk in self.split(hidden.shape[0]):
            part = hidden[chunk]
            if parts:
                # Without this the chunks could all be computed at once.
                part = mx.depends(part, parts[-1])
            parts.append(self.probabilities(self.logits(part), temperature))
        return mx.concatenate(parts)

    def probabilities(self, logits: mx.array, temperature: float) -> mx.array:
        """Return [count, head] probabilities; a trimmed head's need not sum to 1."""
        distribution = mx.softmax(logits / temperature, axis=-1, precise=True)
        return (
            distribution
            if self._head_ids is None
            else mx.take(distribution, self._head_ids, axis=-1)
        )
