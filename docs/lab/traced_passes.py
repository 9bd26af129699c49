"""A target's passes on a GPU: its own forward and the replay of a trace, by context; and what it
costs to read the target on the way.

    PYTHONPATH=. python docs/lab/traced_passes.py MODEL [--contexts 200,900,1900] [--read 3]

MODEL is a folder, or `llama-8b`: random weights of that shape. Milliseconds until the best tokens
are known (and until the features are), medians of interleaved rounds; `trace`: making a trace of
that size and computing one pass with it.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm.models import llama

from protocol.messages import FeatureRequest
from services.engine.traced_forward import TracedForward
from services.kv.slots import round_to_bucket
from services.mlx.loader import load
from services.verifier.feature_source import FeatureSource
from services.verifier.target_model import TargetModel, prepare

ROUNDS = 15
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "vocab_size": 128256, "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


def open_model(name: str) -> Any:
    """The module."""
    if name != "llama-8b":
        return load(Path(name).expanduser()).module
    module = llama.Model(llama.ModelArgs.from_dict(LLAMA_8B))
    module.set_dtype(mx.float16)
    mx.eval(module.parameters())
    return module


class Passes:
    """Passes of one target behind a context."""

    def __init__(self, target: TargetModel, context: int, source: FeatureSource) -> None:
        self._target, self._source = target, source
        self._state = target.states.make()
        self.context = context
        for begin in range(0, context, 512):
            count = min(512, context - begin)
            self._state.append(count, whole=True)
            mx.eval(target.prefill(mx.ones((1, count), mx.int32), cache=self._state.caches))

    def time(self, rows: int, traced: TracedForward | None) -> tuple[float, float]:
        """Milliseconds until the best tokens of a chain are known, and until its features are."""
        state: Any = self._state
        began = time.perf_counter()
        state.chain(rows)
        tokens = mx.arange(5, 5 + rows)[None]
        if traced is None:
            logits = self._target.verify(tokens, cache=state.caches)
        else:
            logits = traced(tokens, state)
        features = self._source.take()
        if features is not None:
            logits = mx.depends(logits, features)
        mx.async_eval(best := mx.argmax(logits[0], axis=-1))
        best.tolist()
        known = time.perf_counter()
        if features is not None:
            features = features.tolist()
        read = time.perf_counter()
        state.trim(self.context)
        return 1e3 * (known - began), 1e3 * (read - began)


def compare(passes: Passes, rows: int, traced: TracedForward) -> list[list[float]]:
    """Medians of both times, by the model's own forward and replayed, which take turns."""
    found = [[passes.time(rows, way) for way in (None, traced)] for _ in range(ROUNDS + 2)]
    ways = zip(*found[2:], strict=True)  # the first two do not count
    return [[round(statistics.median(part), 2) for part in zip(*way, strict=True)] for way in ways]


def name_layers(count: int, read: int) -> list[FeatureRequest | None]:
    """Without features, and if some layers are read, with those of so many."""
    if not read:
        return [None]
    chosen = [2 + number * (count - 5) // max(1, read - 1) for number in range(read)]
    return [None, FeatureRequest(layers=chosen)]


def report(target: TargetModel, traced: TracedForward, source: FeatureSource, given: Any) -> None:
    """Print a line for each context and number of rows, after what was said of the traces."""
    traced.read(source)  # traces are made anew
    for context in map(int, given.contexts.split(",")):
        passes = Passes(target, context, source)
        for rows in map(int, given.rows.split(",")):
            began = time.perf_counter()
            traced.prepare(rows, round_to_bucket(context + rows), target.states.make)
            made = 1e3 * (time.perf_counter() - began)
            own, replayed = compare(passes, rows, traced)
            ways = f"own {own}, replay {replayed}, trace {made:.0f}"
            print(f"  context {context}, {rows} rows: {ways}", flush=True)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--contexts", default="200,450,900,1900,3900")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--read", type=int, default=0, help="layers that are read")
    parser.add_argument("--by-mlx", action="store_true", help="also without our kernels")
    given = parser.parse_args()
    module = open_model(given.model)
    began = time.perf_counter()
    target = prepare(module)
    print(f"prepared in {time.perf_counter() - began:.1f} s, traced: {target.traced is not None}")
    source = FeatureSource(module)
    traced = target.traced or TracedForward(module)
    ways: list[tuple[str, Any]] = [("our products and blocks", contextlib.nullcontext)]
    if given.by_mlx:
        few = module.model.layers[0].self_attn.o_proj.few_rows
        ways.append(("MLX's products and blocks", partial(mock.patch.object, few, "most", 0)))
    for request, (name, way) in itertools.product(
        name_layers(len(module.layers), given.read), ways
    ):
        source.configure(request)
        print(f"{name}, {'read' if request else 'not read'}:")
        with way():
            report(target, traced, source, given)


if __name__ == "__main__":
    main()
