"""What it costs to verify a chain, and to go back, by the kind of state that a model has.

`python docs/lab/model_states.py`: models of random weights and a realistic shape, built with
mlx-lm's own classes and prepared as the verifier does. Per model and way, over a single token
with mlx-lm's own caches on the model as it was:

    stands      a chain of m tokens that stands in full
    rejected    the same chain of which one token stands, round after round: the difference is
                the price of a rejection

and for the window model (`--tables windows`) the memory and the speed at a long context, beside
slots for all tokens. Run it on an idle machine. `--device cpu` or `gpu`, `--models`, `--layers`
and `--context` make it smaller.

`--save FOLDER --tokenizer TARGET` writes the models instead, each with the tokenizer of a model
that is here, for `ssd bench --model FOLDER/NAME --draft-backend ngram --modes ar,ssd,mlx-lm`.
What a model of random weights says hardly ever repeats itself; those with a head of their own
get one that mostly says tokens in loops (`teach_loops`).
"""

# ruff: noqa: E402  # the BLAS must be loaded before MLX

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from services.mlx.blas import load_blas

load_blas(threads=1)  # before anything imports MLX

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from services.kv.cache import KVStore, windows_of
from services.kv.layered import LayeredState
from services.kv.slots import round_to_bucket
from services.kv.state import SequenceState
from services.verifier.target_model import TargetModel, prepare

_VOCABULARY = 49_152
"""As many tokens as the default target's tokenizer has."""
_PROMPT = 128
_CHUNK = 512
_LENGTHS = (1, 2, 3, 4, 6, 8)
_LOOP = 12
"""Tokens of a loop that a taught model says again and again."""
_FOLLOWED = 0.97
"""Share of tokens after which it stays in its loop, at least."""

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
    # The same of about a billion parameters, with a head of its own.
    "qwen3.5-1b-like": {
        "model_type": "qwen3_5",
        "text_config": {
            **_SHARED,
            "model_type": "qwen3_5_text",
            "hidden_size": 1536,
            "intermediate_size": 5120,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "tie_word_embeddings": False,
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
_SMALL = ("qwen3.5-like", "lfm2-like", "gemma3-like")


def configure(name: str, layers: int) -> dict[str, Any]:
    """The model's config.json."""
    config = {**MODELS[name], "num_hidden_layers": layers}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "num_hidden_layers": layers}
    if name == "lfm2-like":
        config["full_attn_idxs"] = list(range(2, layers, 4))
    return config


def build(name: str, layers: int) -> Any:
    """The model with random weights: float32 on a CPU, else bfloat16."""
    mx.random.seed(1)
    config = configure(name, layers)
    model_class, arguments_class = _get_classes(config=config)
    model: Any = model_class(arguments_class.from_dict(config))
    model.set_dtype(mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    mx.eval(model.parameters())
    return model


def teach_loops(model: Any) -> None:
    """Let a model with a head of its own mostly say the tokens of a loop, one after the other.

    The head finds the embedding of the token before; how much of it is left behind the layers
    is set by its scale, tried out until most of a loop is followed.
    """
    body = model.language_model
    embedding = body.model.embed_tokens
    table = embedding.weight
    tokens = mx.arange(_VOCABULARY)
    before = tokens - tokens % _LOOP + (tokens - 1) % _LOOP
    body.lm_head.weight = table[mx.minimum(before, _VOCABULARY - 1)]
    text = 600 * _LOOP + mx.arange(128)[None] % _LOOP
    for power in range(12):
        embedding.weight = table * 1.5**power
        said = mx.argmax(model(text)[0, :-1], axis=-1)
        if float(np.mean(np.array(said == text[0, 1:]))) >= _FOLLOWED:
            return
    raise RuntimeError("the model follows no loop")


def save(name: str, layers: int, folder: Path, tokenizer: Path) -> None:
    """The model as a folder that mlx-lm loads."""
    model = build(name, layers)
    if hasattr(getattr(model, "language_model", None), "lm_head"):
        teach_loops(model)
    folder.mkdir(parents=True)
    parameters: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(parameters), {"format": "mlx"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    # The last token: what is in no prompt is hardly ever said.
    config = configure(name, layers) | {"bos_token_id": 1, "eos_token_id": _VOCABULARY - 1}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def ways_of(model: Any, target: TargetModel) -> Iterator[tuple[str, Callable[[], SequenceState]]]:
    """The way that is taken, and the universal one."""
    found = target.states
    yield found.way, found.make
    if found.way == "replay":
        yield (
            "refeed",
            lambda: LayeredState(
                lambda: make_prompt_cache(model), bucketed=target.bucketed, replay=None, own=True
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
        if state.owed > state.most_owed:  # as the verifier does
            owed = mx.ones((1, state.owed), mx.int32)
            state.append(0)
            model(owed, cache=state.caches)
            state.commit(base)
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


def time_plain(model: Any, rounds: int) -> float:
    """Median milliseconds of a token with mlx-lm's own caches."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.ones((1, _PROMPT), mx.int32), cache=caches))
    times = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        mx.eval(mx.argmax(model(mx.ones((1, 1), mx.int32), cache=caches)[0], axis=-1))
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def compare_ways(name: str, layers: int, rounds: int) -> None:
    """T_v(m) by each way, of chains that stand and of chains that are rejected."""
    model = build(name, layers)
    parameters: Any = tree_flatten(model.parameters())
    size = sum(array.size for _, array in parameters) / 1e6
    plain = time_plain(model, rounds)
    show(f"{name}, {size:.0f} M, mlx-lm", "", f"{plain:.1f}", *["" for _ in _LENGTHS])
    target = prepare(model, may_share_passes=False)
    for way, make in ways_of(model, target):
        state = make()
        fill(model, state, _PROMPT)
        label = f"{name}, {size:.0f} M, {way}"
        for kind, keeps in (("stands", _LENGTHS), ("rejected", [1] * len(_LENGTHS))):
            pairs = zip(_LENGTHS, keeps, strict=True)
            times = [time_round(model, state, m, keep, rounds) for m, keep in pairs]
            show(label, kind, f"{times[0]:.1f}", *(f"{ms / plain:.2f}" for ms in times))


def hold(state: SequenceState, layers: int, tokens: int) -> None:
    """A context of so many tokens, whose keys and values are random: nothing is computed."""
    config = MODELS[_WINDOW_MODEL]
    heads, size = config["num_key_value_heads"], config["head_dim"]
    kind = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    shape = (1, heads, round_to_bucket(tokens), size)
    buffers = []
    for _ in range(layers):
        pair = (mx.random.normal(shape).astype(kind), mx.random.normal(shape).astype(kind))
        mx.eval(pair)
        buffers.append(pair)
    state.take(buffers, tokens)
    state.evaluate()


def time_chunk(model: Any, state: SequenceState, rounds: int) -> float:
    """Median seconds of a chunk of a prompt."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        fill(model, state, state.length + _CHUNK)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def compare_windows(layers: int, context: int, rounds: int) -> None:
    """Memory and speed of the window model at a long context, beside slots for all tokens."""
    model = build(_WINDOW_MODEL, layers)
    windows = windows_of(model)
    target = prepare(model, may_share_passes=False)
    ways: dict[str, Callable[[], SequenceState]] = {
        "all rows": lambda: KVStore(windows, bucketed=target.bucketed),
        "the window's rows": target.states.make,
    }
    for way, make in ways.items():
        state = make()
        hold(state, layers, context)
        held = state.nbytes / 1e6
        single, chain = (time_round(model, state, m, m, rounds) for m in (1, 4))
        chunk = time_chunk(model, state, 3)
        cells = (f"{single:.1f}", f"{1e3 / single:.1f}", f"{chain:.1f}", f"{_CHUNK / chunk:.0f}")
        show(way, f"{held:.0f}", *cells)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description="What going back costs, by kind of state.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--tables", choices=("ways", "windows"), nargs="+", default=("ways",))
    parser.add_argument("--models", choices=MODELS, nargs="+", default=_SMALL)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    given = parser.parse_args()
    mx.set_default_device(mx.cpu if given.device == "cpu" else mx.gpu)
    if given.save is not None:
        for name in given.models:
            save(name, given.layers, given.save / name, given.tokenizer)
        return
    if "ways" in given.tables:
        show("model and way", "chain", "T_v(1), ms", *(f"m = {m}" for m in _LENGTHS))
        show(*["---"] * (3 + len(_LENGTHS)))
        for name in given.models:
            compare_ways(name, given.layers, given.rounds)
    if "windows" in given.tables:
        sys.stdout.write(f"\n{_WINDOW_MODEL}, {given.layers} layers, {given.context} tokens\n\n")
        show("layers hold", "MB", "T_v(1), ms", "tok/s", "T_v(4), ms", "prompt, tok/s")
        show(*["---"] * 6)
        compare_windows(given.layers, given.context, given.rounds)


if __name__ == "__main__":
    main()
