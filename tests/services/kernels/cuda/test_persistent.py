"""Branches of draft tokens by one launch: the source run on the host, beside the model itself."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models import qwen2, qwen3
from mlx_lm.models.cache import KVCache

from protocol.messages import Sampling
from services.kernels.cuda import persistent
from services.kernels.cuda.persistent import (
    BOX_WORDS,
    BRANCHES,
    CALLED,
    COUNT,
    DEPTHS,
    DONE,
    FED,
    FIRST,
    FOUND,
    MOST_DEPTHS,
    MOST_ROWS,
    NAMED,
    RULES,
    STOPPED,
    DraftCall,
    ModelEnds,
    PersistentKernel,
    Unavailable,
    write_call,
)
from services.kernels.cuda.product import Norm
from services.kernels.cuda.rotate import Heads
from services.kernels.cuda.sampling.guess import CANDIDATES, DRAWN, FILTERED, GREEDY
from services.kernels.cuda.sampling.rules import WORDS, write_rules
from services.sampling import candidates
from tests.services.kernels.cuda.host import compile_kernel, halve_words, run_kernel

_COLUMNS, _VOCABULARY, _LAYERS, _KV_HEADS, _SLOTS = 140, 170, 2, 2, 640
_IDS = np.arange(_COLUMNS)[::-1] + 20
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


def _pad(cache: KVCache) -> list[npt.NDArray[np.float32]]:
    held = [np.array(pair)[:, :, : cache.offset] for pair in (cache.keys, cache.values)]
    return [np.pad(pair, ((0, 0), (0, 0), (0, _SLOTS - cache.offset), (0, 0))) for pair in held]


def _run(
    kernel: tuple[Case, Path],
    model: Any,
    text: npt.NDArray[np.int64],
    call: DraftCall,
    blocks: int,
    *,
    stopped: int,
) -> list[npt.NDArray[np.float32]]:
    """The bytes of `Scratch`, what was found, and all keys and values after a call."""
    (family, size, kind), program = kernel
    words = np.zeros(BOX_WORDS, np.uint32)
    words[CALLED] = 0xFFFFFFFE
    positions = range(call.origin, call.origin + call.positions)
    write_call(words.data.cast("B").cast("I"), call, write_rules(positions, _KINDS[kind]))
    words[STOPPED] = stopped
    caches = [KVCache() for _ in range(_LAYERS)]
    model(mx.array(text)[None], cache=caches)
    arrays = [
        array
        for layer, cache in zip(model.layers, caches, strict=True)
        for array in _arrays_of(layer, *_pad(cache))
    ]
    speeds = 10000.0 ** (-np.arange(0, size, 2) / size)
    ends = [model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight]
    shape = [blocks, _SLOTS, _VOCABULARY, DONE, family == "qwen3"]
    inputs = shape, speeds, *arrays, *ends, _IDS, halve_words(words[:DONE])
    return np.split(run_kernel(program, *inputs), [1, 1 + BOX_WORDS - FOUND])


@pytest.mark.parametrize(
    ("blocks", "length", "fed", "forks", "stopped"),
    [
        (1, 5, 0, [4], 0),
        (3, 20, 7, [26], 0),
        (2, 250, 3, [249, 251, 252, 252, 250], 0),
        (3, 600, 8, [607, 606, 600, 607, 605, 599, 604, 607], 0),
        (4, 30, 0, [29, 28, 29], 0),
        (2, 40, 8, [], 0),
        (3, 20, 7, [26, 25], 1),
        (1, 5, 0, [4], 1),
    ],
)
def test_drafts_what_the_model_does(
    kernel: tuple[Case, Path], blocks: int, length: int, fed: int, forks: list[int], *, stopped: int
) -> None:
    """After texts whose keys one block takes, and several: the tokens, their confidences, and the
    keys and values that later passes find. A stopped draft has its first depth."""
    (family, size, kind), _ = kernel
    model, depths = _build(family, size), 4 if forks else 1
    random = np.random.default_rng(length)
    text, trunk, roots = (
        random.integers(0, _VOCABULARY, count) for count in (length, fed, len(forks))
    )
    if not forks:
        roots, forks = trunk, list(range(length - 1, length + fed - 1))
    named = [] if roots is trunk else roots.tolist()
    call = DraftCall(length, trunk.tolist(), named, forks, depths)
    size_of_scratch, *parts = _run(kernel, model, text, call, blocks, stopped=stopped)
    found = parts[0].reshape(MOST_DEPTHS, MOST_ROWS, 2, NAMED)
    depths = 1 if stopped else depths
    assert not found[depths:].any()

    followers = set[int]()
    for branch, (root, fork) in enumerate(zip(roots, forks, strict=True)):
        following = np.array([*[*text, *trunk][: fork + 1], root])
        caches = [KVCache() for _ in range(_LAYERS)]
        for depth in range(depths):
            logits = np.array(model(mx.array(following)[None], cache=caches)[0, -1:])
            # Without filters every token is a candidate.
            best = candidates.best_of(logits, _COLUMNS if kind == DRAWN else CANDIDATES, _IDS)
            top = candidates.perturb(best, [fork + 2 + depth], _KINDS[kind])
            named, shares = found[depth, branch]
            likely = np.array(top.confidences(0, NAMED)) > 1e-6
            assert named[likely].tolist() == top.ids[0, :NAMED][likely].tolist()
            assert shares == pytest.approx(top.confidences(0, NAMED), rel=1e-3, abs=1e-6)
            following = top.ids[0, :1]
            followers.add(int(following[0]))
    assert len(followers) > 1 or stopped
    if len(forks) == 1:  # the slots of a trunk that goes on
        held = np.concatenate([array.ravel() for cache in caches for array in _pad(cache)])
        assert np.allclose(parts[1], held, atol=2e-4)
    blocks_of_model = [_kernels_of(size, mx.float32)] * _LAYERS
    drafting = PersistentKernel(
        blocks_of_model, _ends_of(mx.float32), np.zeros(BOX_WORDS, np.uint32)
    )
    assert size_of_scratch <= drafting._scratch.nbytes < 1.02 * size_of_scratch


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
        self.box = np.zeros(BOX_WORDS, np.uint32)
        self.drafting = PersistentKernel(
            [_kernels_of(64, mx.float16)], _ends_of(mx.float16), self.box
        )
        self.drafting._replays[GREEDY] = self.run
        self.answers = True
        self.slow = MOST_DEPTHS
        """Depths that are done by the time a draft is stopped."""

    def run(self, keys: list[mx.array], values: list[mx.array], previous: mx.array) -> mx.array:
        """Draft as the kernel is asked to."""
        assert len(keys) == len(values) == 1
        count, branches, depths = (int(self.box[at]) for at in (COUNT, BRANCHES, DEPTHS))
        shape = MOST_DEPTHS, MOST_ROWS, 2, NAMED
        found = self.box[FOUND:].view(np.float32).reshape(shape)
        for depth in range(depths if self.answers else 0):
            for branch in range(branches):
                root = int(self.box[FED + count + branch])
                found[depth, branch, 0] = root + depth + np.arange(1, 1 + NAMED)
                found[depth, branch, 1] = int(self.box[RULES + WORDS * depth]) / 8
            if depth < self.slow:
                self.box[DONE] = (int(self.box[CALLED]) + depth + 1) % 2**32
        return previous + 0

    def end(self) -> None:
        """End a draft that is to be stopped."""
        assert self.box[STOPPED]
        self.box[DONE] = self.drafting._asked

    def draft(self, trunk: list[int], roots: list[int], depths: int) -> list[Any]:
        """What is found of each branch at each depth."""
        buffers = [(mx.zeros((1, _KV_HEADS, 256, 64)),) * 2]
        rules = np.tile(np.arange(1, 1 + depths, dtype=np.uint32)[:, None], WORDS)
        call = DraftCall(7, trunk, roots, [6 + len(trunk)] * len(roots), depths)
        running = self.drafting.start(buffers, call, rules, GREEDY)
        return [running.read(depth, len(roots)) for depth in range(depths)]


@pytest.mark.parametrize("trunk", [[], list(range(40, 40 + MOST_ROWS // 2))])
def test_calls_and_answers(trunk: list[int]) -> None:
    device = Device()
    rows = range(60, 60 + MOST_ROWS - len(trunk))
    for depths, roots in ((1, [5]), (3, [9, 3]), (MOST_DEPTHS, list(rows))):
        expected = [
            [(list(range(first, first + NAMED)), [depth / 8] * NAMED) for first in firsts]
            for depth in range(1, 1 + depths)
            for firsts in [[root + depth for root in roots]]
        ]
        assert device.draft(trunk, roots, depths) == expected
        assert device.box[FIRST] == 7


def test_the_slots_of_a_call() -> None:
    """The branches' slots take turns, so many that a shift finds a slot's branch."""
    for roots, taken in ((0, 4), (1, 4), (2, 8), (5, 32), (MOST_ROWS, 64)):
        assert DraftCall(10, [1, 2, 3], [5] * roots, [12] * roots, 4).slots == 13 + taken


def test_a_draft_is_read_after_another_one_began() -> None:
    """Two sequences take turns, depth by depth."""
    device, rules = Device(), np.ones((4, WORDS), np.uint32)
    buffers = [(mx.zeros((1, _KV_HEADS, 256, 64)),) * 2]
    shapes = (([5, 50], 4), ([9], 2))
    running = []
    for roots, depths in shapes:
        call = DraftCall(7, [], roots, [6] * len(roots), depths)
        running.append(device.drafting.start(buffers, call, rules[:depths], GREEDY))
    for depth in range(4):
        for (roots, depths), draft in zip(shapes, running, strict=True):
            if depth < depths:
                first = [named.tokens[0] for named in draft.read(depth, len(roots))]
                assert first == [root + depth + 1 for root in roots]


def test_a_stopped_draft() -> None:
    """What was there can be read, and the next draft begins once it has ended."""
    device, rules = Device(), np.ones((6, WORDS), np.uint32)
    device.slow = 2
    buffers = [(mx.zeros((1, _KV_HEADS, 256, 64)),) * 2]
    call = DraftCall(7, [], [5, 50], [6, 6], 6)
    running = device.drafting.start(buffers, call, rules, GREEDY)
    assert running.read(0, 2)[1].tokens[0] == 51
    assert running.stop() == 2
    assert running.read(1, 2)[0].tokens[0] == 7
    device.end()
    device.slow = MOST_DEPTHS
    assert [found[0].tokens[0] for found in device.draft([], [9], 2)] == [10, 11]
    assert not device.box[STOPPED]


def test_a_draft_is_not_stopped_for_another_one() -> None:
    device, rules = Device(), np.ones((4, WORDS), np.uint32)
    buffers = [(mx.zeros((1, _KV_HEADS, 256, 64)),) * 2]
    call = DraftCall(7, [], [5], [6], 4)
    first, second = (device.drafting.start(buffers, call, rules, GREEDY) for _ in range(2))
    assert first.stop() == 4
    assert not device.box[STOPPED]
    assert second.stop() == 4


def test_a_launch_that_fails_is_not_waited_for() -> None:
    device = Device()
    with (
        patch.object(persistent, "launch", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError),
    ):
        device.draft([], [5], 3)
    device.box[DONE] = device.drafting._asked  # the kernel never ran
    assert [found[0].tokens[0] for found in device.draft([], [5], 2)] == [6, 7]


def test_the_count_of_depths_may_overflow() -> None:
    device = Device()
    device.drafting._asked = 2**32 - 2
    device.box[DONE] = 2**32 - 2
    for _ in range(2):
        assert [found[0][0][0] for found in device.draft([], [5], 3)] == [6, 7, 8]
    assert device.box[DONE] == 4


def test_a_device_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "_DEADLINE_S", 0.0)
    device = Device()
    device.answers = False
    with pytest.raises(Unavailable, match="no token"):
        device.draft([], [5], 3)
    device.answers = True
    with pytest.raises(Unavailable):  # it may still write the last answers
        device.draft([], [5], 3)


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
    assert {"MOST_ROWS", "MOST_DEPTHS", "MOST_PARTS", "NAMED"} < places.keys()
    assert {"CALLED", "BRANCHES", "ORIGIN", "FORKS", "RULES", "DONE", "FOUND"} < places.keys()
    assert places == {name: getattr(persistent, name) for name in places}
