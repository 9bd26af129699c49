"""How far Mamba-2's form for several tokens is from its form for one, and what that decides.

`PYTHONPATH=. python docs/lab/mamba2_margin.py`: a model of random weights decodes a text token by
token; then the same text is verified in chains, once in mlx-lm's form for several tokens and
once walked row by row, as the verifier does (`services/kv/replay.py`). Per format and form:

    largest     the largest difference of a logit from plain decoding's
    margin      the smallest distance of the best two logits in plain decoding
    changed     tokens that would have been chosen otherwise
"""

# ruff: noqa: E402  # the BLAS must be loaded before MLX

import argparse
import sys
from collections.abc import Callable
from typing import Any

from services.mlx.blas import load_blas

load_blas(threads=1)  # before anything imports MLX

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mamba2 import Model, ModelArgs

from services.kv.rewinding import find_rewinding

_PROMPT = 64
_CHAIN = 4
_VOCABULARY = 16_384


def build(kind: mx.Dtype) -> Any:
    """A Mamba-2 of 8 layers, 768 wide."""
    mx.random.seed(1)
    config = {
        "model_type": "mamba2",
        "num_heads": 24,
        "head_dim": 64,
        "vocab_size": _VOCABULARY,
        "hidden_size": 768,
        "intermediate_size": 1536,
        "state_size": 128,
        "num_hidden_layers": 8,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 48,
    }
    model: Any = Model(ModelArgs.from_dict(config))
    model.set_dtype(kind)
    mx.eval(model.parameters())
    return model


def decode(model: Any, prompt: mx.array, count: int) -> tuple[list[int], Any]:
    """The likeliest tokens, one a pass, and the logits [count, vocabulary] they are chosen by."""
    caches = make_prompt_cache(model)
    row, tokens, rows = prompt, [], []
    for _ in range(count):
        logits = model(row, cache=caches)[0, -1].astype(mx.float32)
        rows.append(np.array(logits))
        tokens.append(int(np.argmax(rows[-1])))
        row = mx.array([[tokens[-1]]])
    return tokens, np.stack(rows)


def verify(model: Any, prompt: mx.array, tokens: list[int], *, walked: bool) -> Any:
    """The logits behind all but the last of these tokens, verified in chains."""
    state = find_rewinding(model, bucketed=False).make()
    state.append(_PROMPT, whole=True)
    found = [model(prompt, cache=state.caches)[0, -1:]]
    state.commit(_PROMPT)
    for first in range(0, len(tokens) - 1, _CHAIN):
        chain = tokens[first : min(first + _CHAIN, len(tokens) - 1)]
        state.append(len(chain), whole=not walked)  # what stands whole is not recorded
        found.append(model(mx.array([chain]), cache=state.caches)[0])
        state.commit(state.length)
        mx.eval(found[-1])
    return np.array(mx.concatenate(found).astype(mx.float32))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Mamba-2 in chains, beside one token at a time.")
    parser.add_argument("--tokens", type=int, default=257)
    count = parser.parse_args().tokens
    mx.set_default_device(mx.cpu)
    write: Callable[[str], Any] = sys.stdout.write
    write("| format | form | largest | margin | changed |\n|---|---|---|---|---|\n")
    for name, kind in (("float32", mx.float32), ("bfloat16", mx.bfloat16)):
        model = build(kind)
        prompt = mx.random.randint(0, _VOCABULARY, (1, _PROMPT), key=mx.random.key(2))
        tokens, plain = decode(model, prompt, count)
        best = np.sort(plain, axis=-1)[:, -2:]
        margin = float((best[:, 1] - best[:, 0]).min())
        for form, walked in (("several tokens at once", False), ("row by row", True)):
            logits = verify(model, prompt, tokens, walked=walked)
            largest = float(np.abs(logits - plain).max())
            changed = int((logits.argmax(-1) != plain.argmax(-1)).sum())
            write(f"| {name} | {form} | {largest:.2g} | {margin:.2g} | {changed} of {count} |\n")


if __name__ == "__main__":
    main()
