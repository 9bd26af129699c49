"""Passes over few rows of small models, as the tests of their kernels make them."""

from typing import Any

import mlx.core as mx
import numpy as np

from services.kv.cache import KVStore, windows_of
from services.mlx.few_rows.blocks import MOST_ROWS

PROMPT = [(5 * i) % 250 + 4 for i in range(30)]
ROWS = [(7 * i) % 250 + 4 for i in range(MOST_ROWS)]


def begun(model: Any, prompt: list[int] = PROMPT) -> KVStore:
    """What is known of the prompt."""
    store = KVStore(windows_of(model), bucketed=False)
    if prompt:
        logits(model, store, prompt)
    return store


def logits(model: Any, store: KVStore, tokens: list[int]) -> Any:
    """[tokens, vocabulary] behind what is in the store."""
    store.chain(len(tokens))
    return np.array(model(mx.array([tokens]), cache=store.caches)[0])
