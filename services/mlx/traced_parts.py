"""A decoder in two parts: a GPU begins with the first while the host builds the rest."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from services.mlx.plain_blocks import FAMILIES, find_kernels


class DecoderParts:
    """The first blocks of a model, and what follows them.

    Args:
        model: of one of `FAMILIES`.
        first: blocks of the first part.
    """

    def __init__(self, model: Any, first: int) -> None:
        self._model, self.first = model, first

    def begin(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """States [1, n, width] behind the first blocks, whose caches these are; and the mask."""
        inner = self._model.model
        states: mx.array = inner.embed_tokens(tokens)
        mask: mx.array = create_attention_mask(states, caches[0])
        for layer, cache in zip(inner.layers[: self.first], caches, strict=True):
            states = layer(states, mask, cache)
        return states, mask

    def end(self, states: mx.array, mask: mx.array, caches: Sequence[Any]) -> mx.array:
        """[1, n, vocabulary] logits of what `begin` gave, with the other blocks' caches."""
        inner = self._model.model
        for layer, cache in zip(inner.layers[self.first :], caches, strict=True):
            states = layer(states, mask, cache)
        states = inner.norm(states)
        tied = self._model.args.tie_word_embeddings
        logits: mx.array = (inner.embed_tokens.as_linear if tied else self._model.lm_head)(states)
        return logits


def split_decoder(model: Any, first: int) -> DecoderParts | None:
    """The parts of a model whose blocks are all computed by kernels of ours; else None."""
    kind, blocks = type(model), len(find_kernels(model))
    known = kind.__qualname__ == "Model" and kind.__module__ in {
        f"mlx_lm.models.{family}" for family in FAMILIES
    }
    if not known or not first < blocks == len(model.model.layers):
        return None
    spread = getattr(model.model, "pipeline_size", 1) > 1
    slides = any(getattr(layer, "use_sliding", False) for layer in model.model.layers)
    return None if spread or slides else DecoderParts(model, first)
