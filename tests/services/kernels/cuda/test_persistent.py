"""Chains of draft tokens by one launch: the source run on the host, beside the model itself."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models import qwen2, qwen3
from mlx_lm.models.cache import KVCache

from protocol.messages import Sampling
from services.kernels.cuda import persistent
from services.kernels.cuda.persistent import (
    CALLED,
    COUNT,
    DEPTHS,
    DONE,
    DRAFTED,
    FED,
    FIRST,
    MOST_DEPTHS,
    MOST_ROWS,
    RULES,
    ModelEnds,
    PersistentChain,
    Unavailable,
)
from services.kernels.cuda.product import Norm
from services.kernels.cuda.rotate import Heads
from services.kernels.cuda.sampling.guess import CANDIDATES, DRAWN, FILTERED, GREEDY
from services.kernels.cuda.sampling.rules import WORDS, write_rules
from services.sampling import candidates
from tests.services.kernels.cuda.host import compile_kernel, halve_words, run_kernel

_COLUMNS, _VOCABULARY, _LAYERS, _KV_HEADS = 100, 130, 2, 2
_SHAPE = {
    "hidden_size": 256, "num_hidden_layers": _LAYERS, "intermediate_size": 104,
    "num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": _VOCABULARY,
    "num_key_value_heads": _KV_HEADS, "rope_theta": 10000.0, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
_KINDS = {
    GREEDY: Sampling(),
    DRAWN: Sampling(temperature=0.8, seed=3),
    FILTERED: Sampling(temperature=0.9, seed=4, top_k=5, top_p=0.9),
}
Case = tuple[str, int, int]


@pytest.fixture(
    scope="module",
    params=[("qwen2", 64, GREEDY), ("qwen3", 128, DRAWN), ("qwen3", 64, FILTERED)],
    ids=str,
)
def kernel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path]:
    _, size, kind = request.param
    program = tmp_path_factory.mktemp("kernel") / "persistent"
    return request.param, compile_kernel("persistent_host.cpp", program, SIZE=size, CHOICE=kind)


def _build(family: str, size: int) -> Any:
    mx.random.seed(5)
    if family == "qwen2":
        model: Any = qwen2.Model(qwen2.ModelArgs(model_type=family, **_SHAPE))
    else:
        model = qwen3.Model(qwen3.ModelArgs(model_type=family, head_dim=size, **_SHAPE))
    model.lm_head.weight = 0.5 * mx.random.normal((_COLUMNS, _SHAPE["hidden_size"]))
    for _, module in model.named_modules():
        for name in ("weight", "bias"):
            if name in module:
                array = module[name]
                near = 1.0 if "Norm" in type(module).__name__ else 0.0
                scale = 0.3 if near or array.ndim == 1 else 1.5 * array.shape[-1] ** -0.5
                module[name] = near + scale * mx.random.normal(array.shape)
    return model


def _arrays_of(layer: Any, keys: Any, values: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = mx.concatenate([part.weight for part in parts])
    bias = [part.bias if "bias" in part else mx.zeros(len(part.weight)) for part in parts]
    normed = hasattr(attention, "q_norm")
    gains = [attention.q_norm.weight, attention.k_norm.weight] if normed else []
    gate_up = mx.concatenate([mlp.gate_proj.weight, mlp.up_proj.weight])
    return [
        layer.input_layernorm.weight, qkv, mx.concatenate(bias), *gains, attention.o_proj.weight,
        layer.post_attention_layernorm.weight, gate_up, mlp.down_proj.weight, keys, values,
    ]  # fmt: skip


def _pad(cache: KVCache, slots: int) -> list[npt.NDArray[np.float32]]:
    held = [np.array(pair)[:, :, : cache.offset] for pair in (cache.keys, cache.values)]
    return [np.pad(pair, ((0, 0), (0, 0), (0, slots - cache.offset), (0, 0))) for pair in held]


@pytest.mark.parametrize(
    ("blocks", "length", "fed"), [(1, 5, 1), (3, 20, 8), (2, 250, 8), (3, 600, 2)]
)
def test_drafts_what_the_model_does(
    kernel: tuple[Case, Path], blocks: int, length: int, fed: int
) -> None:
    """After texts whose keys one block takes, and several: the tokens, their confidences, and the
    keys and values that later passes find."""
    (family, size, kind), program = kernel
    model, depths, slots = _build(family, size), 4, 640
    random = np.random.default_rng(length)
    text, tokens = random.integers(0, _VOCABULARY, length), random.integers(0, _VOCABULARY, fed)
    ids, after = np.arange(_COLUMNS)[::-1] + 20, length + fed
    positions = list(range(after, after + depths))
    caches = [KVCache() for _ in range(_LAYERS)]
    model(mx.array(text)[None], cache=caches)
    arrays = [
        array
        for layer, cache in zip(model.layers, caches, strict=True)
        for array in _arrays_of(layer, *_pad(cache, slots))
    ]
    speeds = 10000.0 ** (-np.arange(0, size, 2) / size)
    ends = [model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight]
    shape = [blocks, slots, length, fed, depths, _VOCABULARY, family == "qwen3"]
    words = halve_words(write_rules(positions, _KINDS[kind]))
    found = run_kernel(program, shape, speeds, *arrays, *ends, ids, tokens, words)

    expected, following = [], tokens
    for position in positions:
        logits = np.array(model(mx.array(following)[None], cache=caches)[0, -1:])
        # Without filters every token is a candidate.
        best = candidates.best_of(logits, _COLUMNS if kind == DRAWN else CANDIDATES, ids)
        top = candidates.perturb(best, [position], _KINDS[kind])
        expected.append((int(top.ids[0, 0]), *top.confidences(0, 1)))
        following = top.ids[0, :1]
    size_of_scratch, *found = np.split(found, [1, 1 + 2 * depths])
    drafted, stored = found[0].reshape(depths, 2), found[1]
    assert drafted[:, 0].tolist() == [token for token, _ in expected]
    assert drafted[:, 1] == pytest.approx([share for _, share in expected], rel=1e-3)
    assert len({token for token, _ in expected}) > 1
    held = np.concatenate([array.ravel() for cache in caches for array in _pad(cache, slots)])
    assert np.allclose(stored, held, atol=2e-4)
    blocks_of_model = [_kernels_of(size, mx.float32)] * _LAYERS
    chain = PersistentChain(blocks_of_model, _ends_of(mx.float32), np.zeros(192, np.uint32))
    assert size_of_scratch <= chain._scratch.nbytes < 1.02 * size_of_scratch


# ---------------------------------------------------------------- the calls


def _kernels_of(size: int, dtype: mx.Dtype) -> Any:
    width, hidden = _SHAPE["hidden_size"], _SHAPE["intermediate_size"]
    arrays = [mx.zeros(shape, dtype) for shape in [(8 * size, width), (width, hidden)]]
    weights = SimpleNamespace(qkv=arrays[0], down=arrays[1])
    return SimpleNamespace(heads=Heads(4, _KV_HEADS, size, size, arrays[0], None), weights=weights)


def _ends_of(dtype: mx.Dtype) -> ModelEnds:
    width = _SHAPE["hidden_size"]
    table, ids = mx.zeros((_COLUMNS, width), dtype), mx.zeros(_COLUMNS, mx.int32)
    return ModelEnds(table, Norm(table[0], 1e-5), table, ids)


class Device:
    """Answers the calls in a box: each token is one more than the one before."""

    def __init__(self) -> None:
        self.box = np.zeros(192, np.uint32)
        self.chain = PersistentChain([_kernels_of(64, mx.float16)], _ends_of(mx.float16), self.box)
        self.chain._replays[GREEDY] = self.run
        self.answers = True

    def run(self, keys: list[mx.array], values: list[mx.array], previous: mx.array) -> mx.array:
        """Draft as the kernel is asked to."""
        assert len(keys) == len(values) == 1
        count, depths = int(self.box[COUNT]), int(self.box[DEPTHS])
        last = int(self.box[FED + count - 1])
        for depth in range(1, 1 + depths if self.answers else 1):
            self.box[DRAFTED + 2 * depth] = last + depth
            share = np.float32(int(self.box[RULES + WORDS * (depth - 1)]) / 8)
            self.box[DRAFTED + 2 * depth + 1] = share.view(np.uint32)
            self.box[DONE] = (int(self.box[CALLED]) + depth) % 2**32
        return previous + 0

    def draft(self, tokens: list[int], depths: int) -> list[tuple[int, float]]:
        """Ask for a chain."""
        buffers = [(mx.zeros((1, _KV_HEADS, 256, 64)),) * 2]
        rules = np.tile(np.arange(1, 1 + depths, dtype=np.uint32)[:, None], WORDS)
        return list(self.chain.draft(buffers, 7, tokens, rules, GREEDY))


@pytest.mark.parametrize("tokens", [[5], list(range(40, 40 + MOST_ROWS))])
def test_calls_and_answers(tokens: list[int]) -> None:
    device = Device()
    for depths in (1, 3, MOST_DEPTHS):
        expected = [(tokens[-1] + depth, depth / 8) for depth in range(1, 1 + depths)]
        assert device.draft(tokens, depths) == expected
        assert device.box[FIRST] == 7


def test_the_count_of_tokens_may_overflow() -> None:
    device = Device()
    device.chain._asked = 2**32 - 2
    device.box[DONE] = 2**32 - 2
    for _ in range(2):
        assert [token for token, _ in device.draft([5], 3)] == [6, 7, 8]
    assert device.box[DONE] == 4


def test_a_device_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "_DEADLINE_S", 0.0)
    device = Device()
    device.answers = False
    with pytest.raises(Unavailable, match="no token"):
        device.draft([5], 3)
    device.answers = True
    with pytest.raises(Unavailable):  # it may still write the last answers
        device.draft([5], 3)


def test_both_languages_have_the_same_places() -> None:
    folder = Path(persistent.__file__).parent
    text = "".join(
        (folder / name).read_text("utf-8") for name in ("early_product.cuh", "persistent.cuh")
    )
    places: dict[str, int] = {}
    for name, value in re.findall(r"\b([A-Z_]+) = ([\w +]+)[,;]", text):
        if hasattr(persistent, name):
            terms = value.split(" + ")
            places[name] = sum(int(term) if term.isdigit() else places[term] for term in terms)
    assert {"MOST_ROWS", "MOST_DEPTHS", "MOST_PARTS", "MOST_BLOCKS"} < places.keys()
    assert {"CALLED", "COUNT", "FIRST", "DEPTHS", "FED", "RULES", "DONE", "DRAFTED"} < places.keys()
    assert places == {name: getattr(persistent, name) for name in places}
