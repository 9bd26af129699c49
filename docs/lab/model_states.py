"""What it costs to verify a chain, and to go back, by the kind of state that a model has.

`python docs/lab/model_states.py`: models of random weights and a realistic shape, built with
mlx-lm's own classes. Per model and way:

    T_v(m) / T_v(1)   a chain of m tokens that stands in full, over one of a single token
    rejected          the same chain of which one token stands, round after round: the
                      difference is the price of a rejection

and for the window model the memory and the speed at a long context, beside slots for all
tokens. Run it on an idle machine. `--device cpu` or `gpu`, `--layers` and `--context` make it
smaller.
"""

# ruff: noqa: E402  # the BLAS must be loaded before MLX

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from services.mlx.blas import load_blas

load_blas(threads=1)  # before anything imports MLX

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from services.kv.cache import KVStore, windows_of
from services.kv.layered import LayeredState
from services.kv.rewinding import find_rewinding
from services.kv.state import SequenceState

_VOCABULARY = 32_000
_PROMPT = 128
_CHUNK = 512
_LENGTHS = (1, 2, 3, 4, 6, 8)

_SHARED: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 1 << 18,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

MODELS: dict[str, dict[str, Any]] = {
    # Three gated delta nets to one attention layer, as Qwen 3.5 of 0.8B.
    "qwen3.5-like": {
        "model_type": "qwen3_5",
        "text_config": {
            **_SHARED,
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "tie_word_embeddings": True,
        },
    },
    # Short convolutions with an attention layer now and then, as LFM2 of 700M.
    "lfm2-like": {
        **_SHARED,
        "model_type": "lfm2",
        "hidden_size": 1536,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 1536,
        "block_ff_dim": 6912,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    # Windows of 512 and full layers five to one, as Gemma 3 of 1B.
    "gemma3-like": {
        **_SHARED,
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
}

_WINDOW_MODEL = "gemma3-like"


def build(name: str, layers: int) -> Any:
    """The model with random weights: float32 on a CPU, else bfloat16."""
    mx.random.seed(1)
    config = {**MODELS[name], "num_hidden_layers": layers}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "num_hidden_layers": layers}
    if name == "lfm2-like":
        config["full_attn_idxs"] = list(range(2, layers, 4))
    model_class, arguments_class = _get_classes(config=config)
    model: Any = model_class(arguments_class.from_dict(config))
    model.set_dtype(mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    mx.eval(model.parameters())
    return model


def ways_of(model: Any) -> Iterator[tuple[str, Callable[[], SequenceState]]]:
    """The way that is taken, and the universal one."""
    bucketed = mx.default_device() != mx.cpu and mx.cuda.is_available()
    found = find_rewinding(model, bucketed=bucketed)
    yield found.way, found.make
    if found.way == "replay":
        yield (
            "refeed",
            lambda: LayeredState(
                lambda: make_prompt_cache(model), bucketed=bucketed, replay=None, own=True
            ),
        )


def fill(model: Any, state: SequenceState, tokens: int) -> None:
    """A prompt of so many tokens."""
    while state.length < tokens:
        count = min(_CHUNK, tokens - state.length)
        state.append(count, whole=True)
        model(mx.ones((1, count), mx.int32), cache=state.caches)
        state.commit(state.length)
        state.evaluate()


def time_round(model: Any, state: SequenceState, length: int, keep: int, rounds: int) -> float:
    """Median milliseconds of a round: a chain of which the first `keep` tokens stand."""
    times = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        base = state.length
        row = mx.ones((1, state.owed + length), mx.int32)
        state.append(length)
        logits = model(row, cache=state.caches)
        mx.eval(mx.argmax(logits[0, -length:], axis=-1))
        state.commit(base + keep)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def show(*cells: object) -> None:
    """A line of a table."""
    sys.stdout.write("| " + " | ".join(str(cell) for cell in cells) + " |\n")
    sys.stdout.flush()


def compare_ways(name: str, layers: int, rounds: int) -> None:
    """T_v(m) by each way, of chains that stand and of chains that are rejected."""
    model = build(name, layers)
    parameters: Any = tree_flatten(model.parameters())
    size = sum(array.size for _, array in parameters) / 1e6
    for way, make in ways_of(model):
        state = make()
        fill(model, state, _PROMPT)
        single = time_round(model, state, 1, 1, rounds)
        stands = [time_round(model, state, m, m, rounds) / single for m in _LENGTHS]
        rejected = [time_round(model, state, m, 1, rounds) / single for m in _LENGTHS]
        label = f"{name}, {size:.0f} M, {way}"
        show(label, "stands", f"{single:.1f}", *(f"{ratio:.2f}" for ratio in stands))
        show(label, "rejected", "", *(f"{ratio:.2f}" for ratio in rejected))


def compare_windows(layers: int, context: int, rounds: int) -> None:
    """Memory and speed of the window model at a long context, beside slots for all tokens."""
    model = build(_WINDOW_MODEL, layers)
    windows = windows_of(model)
    ways = {"slots": lambda: KVStore(windows, bucketed=False), **dict(ways_of(model))}
    for way, make in ways.items():
        state = make()
        fill(model, state, context)
        held = state.nbytes / 1e6
        times = [time_round(model, state, m, m, rounds) for m in (1, 4)]
        show(way, f"{held:.0f}", *(f"{ms:.1f}" for ms in times))


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description="What going back costs, by kind of state.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    mx.set_default_device(mx.cpu if given.device == "cpu" else mx.gpu)
    show("model and way", "chain", "T_v(1), ms", *(f"m = {m}" for m in _LENGTHS))
    show(*["---"] * (3 + len(_LENGTHS)))
    for name in MODELS:
        compare_ways(name, given.layers, given.rounds)
    sys.stdout.write(f"\n{_WINDOW_MODEL} at {given.context} tokens\n\n")
    show("way", "MB", "T_v(1), ms", "T_v(4), ms")
    show(*["---"] * 4)
    compare_windows(given.layers, given.context, given.rounds)


if __name__ == "__main__":
    main()
