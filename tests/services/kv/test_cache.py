"""KV memory in slots, against plain lists and mlx-lm's own caches."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from protocol.errors import ModelError
from services.engine.batch import Span
from services.kv.cache import KVStore, SlotCache
from services.mlx.loader import windows_of
from tests.support.reference import reference
from tests.support.tiny_models import FAMILIES, RECURRENT, SLOTTED, WINDOW

Bools = npt.NDArray[np.bool_]

HEADS, SIZE = 2, 4
BUCKET = 256


def rows_of(labels: list[int], sign: int = 1) -> mx.array:
    """Keys (or values, sign -1) that carry a label per token, [1, heads, tokens, size]."""
    base = sign * np.array(labels, np.float32)[None, None, :, None]
    return mx.array(np.broadcast_to(base, (1, HEADS, len(labels), SIZE)))


def labels_of(rows: mx.array) -> list[int]:
    """The labels back; every head and element must carry the same."""
    found = np.array(rows)
    assert (found == found[:1, :1, :, :1]).all()
    return [int(label) for label in found[0, 0, :, 0]]


def as_mask(mask: mx.array | str | None) -> Bools:
    assert isinstance(mask, mx.array)
    return np.array(mask)


def causal(count: int, start: int, window: int | None) -> Bools:
    """mlx-lm's own mask, [count, start + count]."""
    return np.array(create_causal_mask(count, start, window_size=window))


@dataclass
class Model:
    """A store of one cache, and what it should hold: a list of labels."""

    store: KVStore
    trunk: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    next_label: int = 1

    @property
    def cache(self) -> SlotCache:
        return self.store.caches[0]

    def labels(self, count: int) -> list[int]:
        self.next_label += count
        return list(range(self.next_label - count, self.next_label))

    def write(self, labels: list[int]) -> list[int]:
        """Store them in the pass's slots; what attention would see."""
        keys, values = self.cache.update_and_fetch(rows_of(labels), rows_of(labels, -1))
        assert labels_of(keys) == [-label for label in labels_of(values)]
        return labels_of(keys)

    def chain(self, count: int) -> None:
        """Append to the trunk; scratch behind it is lost."""
        labels = self.labels(count)
        self.store.chain(count)
        assert self.cache.offset == len(self.trunk)
        self.trunk, self.scratch = self.trunk + labels, []
        self.check(self.write(labels))

    def branches(self, count: int) -> None:
        """Write a row of branches behind what scratch there is."""
        start = len(self.trunk) + len(self.scratch)
        positions = np.arange(start + count)
        self.store.place(Span(start, positions, np.ones((count, start + count), bool)))
        labels = self.labels(count)
        self.scratch = self.scratch + labels
        self.check(self.write(labels))

    def move(self, slots: list[int]) -> None:
        """Adopt scratch slots, counted from the end of the trunk."""
        if not self.scratch:
            return
        slots = [slot % len(self.scratch) for slot in slots]
        self.store.move([len(self.trunk) + slot for slot in slots])
        self.trunk = self.trunk + [self.scratch[slot] for slot in slots]
        self.scratch = []

    def trim(self, dropped: int) -> None:
        self.trunk = self.trunk[: max(0, len(self.trunk) - dropped)]
        self.scratch = []
        self.store.trim(len(self.trunk))

    def check(self, seen: list[int]) -> None:
        held = self.trunk + self.scratch
        assert held == seen[: len(held)]
        assert self.store.key_length(len(held)) == len(seen)


steps = st.one_of(
    st.tuples(st.just("chain"), st.integers(1, 90)),
    st.tuples(st.just("branches"), st.integers(1, 40)),
    st.tuples(st.just("move"), st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True)),
    st.tuples(st.just("trim"), st.integers(0, 60)),
)


@given(script=st.lists(steps, max_size=24), bucketed=st.booleans())
def test_slots_hold_what_was_written(*, script: list[tuple[str, Any]], bucketed: bool) -> None:
    """Any mixture of chains, branches, moves and trims leaves the right rows in the trunk."""
    model = Model(KVStore([None], bucketed=bucketed))
    for step, argument in script:
        getattr(model, step)(argument)
        assert len(model.trunk) == model.store.length
    model.chain(1)


def test_moves_may_overlap_their_source() -> None:
    """Rows are moved as if all were read before the first is written."""
    model = Model(KVStore([None], bucketed=False))
    model.chain(2)
    model.branches(4)
    model.move([2, 0, 3, 1])
    assert model.trunk == [1, 2, 5, 3, 6, 4]
    model.chain(1)


def test_buffers_grow_by_buckets() -> None:
    """A buffer grows in steps of 256 slots and keeps what it holds."""
    model = Model(KVStore([None], bucketed=False))
    for count in (255, 1, 1, 300):
        model.chain(count)
    assert model.cache.keys is not None
    assert model.cache.keys.shape == (1, HEADS, 3 * BUCKET, SIZE)
    assert [buffer.shape[2] for buffer in model.cache.state] == [3 * BUCKET] * 2


def test_what_was_fetched_stays_as_it_was() -> None:
    """Arrays that a lazy forward still needs are not changed by later writes."""
    model = Model(KVStore([None], bucketed=False))
    model.store.chain(3)
    keys, _ = model.cache.update_and_fetch(rows_of([1, 2, 3]), rows_of([1, 2, 3]))
    model.store.trim(0)
    model.store.chain(3)
    model.cache.update_and_fetch(rows_of([7, 8, 9]), rows_of([7, 8, 9]))
    assert labels_of(keys) == [1, 2, 3]


@pytest.mark.parametrize("length", [-1, 4])
def test_only_what_is_there_can_be_trimmed(length: int) -> None:
    """Trimming to more tokens than there are, or to fewer than none, is an error."""
    store = KVStore([None], bucketed=False)
    store.chain(3)
    with pytest.raises(ValueError, match=f"cannot trim 3 tokens to {length}"):
        store.trim(length)
    store.trim(3)
    assert store.length == 3


def test_an_empty_cache_has_nothing_to_move() -> None:
    """Moving before anything was stored is an error, not silence."""
    with pytest.raises(ValueError, match="no slots to move"):
        KVStore([None], bucketed=False).move([1])
    assert KVStore([None], bucketed=False).caches[0].state == []


# ---------------------------------------------------------------- masks


@given(
    start=st.integers(0, 20),
    count=st.integers(1, 12),
    window=st.none() | st.integers(1, 24),
    by_call=st.booleans(),
)
def test_masks_of_chains_are_those_of_mlx_lm(
    *, start: int, count: int, window: int | None, by_call: bool
) -> None:
    """With a window, told by the layer or by the call, and without; never more than is visible.

    None and "causal" stand only where they mean the same.
    """
    store = KVStore([None if by_call else window], bucketed=False)
    if start:
        store.chain(start)
    store.chain(count)
    told = window if by_call else None
    expected = causal(count, start, window)
    for array in (False, True):
        mask = store.caches[0].make_mask(count, return_array=array, window_size=told)
        if mask is None:
            assert count == 1
            assert expected.all()
        elif isinstance(mask, str):
            assert (mask, array) == ("causal", False)
            np.testing.assert_array_equal(causal(count, start, None), expected)
        else:
            np.testing.assert_array_equal(expected, as_mask(mask))


@given(
    trunk=st.integers(1, 20),
    forks=st.lists(st.integers(0, 19), min_size=1, max_size=6),
    depth=st.integers(0, 3),
    window=st.none() | st.integers(1, 12),
    bucketed=st.booleans(),
)
def test_masks_of_branches_show_their_own_past(
    *, trunk: int, forks: list[int], depth: int, window: int | None, bucketed: bool
) -> None:
    """A branch sees the trunk up to its fork and its own tokens, as far as the window reaches."""
    forks = [fork % trunk for fork in forks]
    own = np.tile(np.eye(len(forks), dtype=bool), (1, depth + 1))
    visible = np.concatenate([np.arange(trunk)[None] <= np.array(forks)[:, None], own], axis=1)
    scratch = [fork + 1 + level for level in range(depth + 1) for fork in forks]
    positions = np.concatenate([np.arange(trunk), scratch])
    store = KVStore([window], bucketed=bucketed)
    store.chain(trunk)
    store.place(Span(trunk + depth * len(forks), positions, visible))
    mask = as_mask(store.caches[0].make_mask(len(forks)))
    reach = BUCKET if bucketed else len(positions)
    expected = np.zeros((len(forks), reach), bool)
    for row, fork in enumerate(forks):
        for slot, position in enumerate(positions):
            near = window is None or fork + 1 + depth - position < window
            expected[row, slot] = visible[row, slot] and near
    np.testing.assert_array_equal(expected, mask)
    offset = store.caches[0].offset
    assert isinstance(offset, mx.array)
    assert offset.tolist() == [fork + 1 + depth for fork in forks]


@pytest.mark.parametrize(("count", "window"), [(1, 4), (5, None), (5, 4)])
def test_buckets_hide_their_padding(count: int, window: int | None) -> None:
    """With buckets a mask is an array; it is False beyond the slots in use."""
    store = KVStore([window], bucketed=True)
    store.chain(300)
    store.chain(count)
    mask = as_mask(store.caches[0].make_mask(count))
    assert mask.shape == (count, 2 * BUCKET)
    np.testing.assert_array_equal(causal(count, 300, window), mask[:, : 300 + count])
    assert not mask[:, 300 + count :].any()


@pytest.mark.parametrize(("before", "count"), [(0, 2 * BUCKET), (BUCKET, BUCKET)])
def test_a_chunk_that_fills_its_buckets_needs_no_mask(before: int, count: int) -> None:
    """Its sizes recur as they are; beside another window than all there is one."""
    store = KVStore([None, 4], bucketed=True)
    store.chain(before)
    store.chain(count)
    assert store.caches[0].make_mask(count) == "causal"
    mask = as_mask(store.caches[1].make_mask(count))
    np.testing.assert_array_equal(causal(count, before, 4), mask)


@pytest.mark.parametrize(("before", "count"), [(BUCKET - 5, 5), (10, BUCKET)])
def test_other_rows_behind_a_text_have_a_mask(before: int, count: int) -> None:
    """Few rows, whose kernels take one, and chunks with padding behind them."""
    store = KVStore([None], bucketed=True)
    store.chain(before)
    store.chain(count)
    mask = as_mask(store.caches[0].make_mask(count))
    np.testing.assert_array_equal(causal(count, before, None), mask[:, : before + count])
    assert not mask[:, before + count :].any()


def test_a_single_token_needs_neither_bucket_nor_mask() -> None:
    """CUDA has kernels for it at any length; also where only the model knows of a window."""
    store = KVStore([None, 400, None], bucketed=True)
    rows = mx.zeros((1, 1, 300, 2))
    store.chain(300)
    for cache in store.caches:
        assert cache.update_and_fetch(rows, rows)[0].shape[2] == 2 * BUCKET
    store.chain(1)
    for cache in store.caches:
        assert cache.make_mask(1) is None
        assert cache.update_and_fetch(rows[:, :, :1], rows[:, :, :1])[0].shape[2] == 301
    by_call = as_mask(store.caches[2].make_mask(1, window_size=4))
    np.testing.assert_array_equal(causal(1, 300, 4), by_call)


def test_masks_are_made_once_per_frame() -> None:
    """All layers of a forward share one mask per window; the next forward has another."""
    store = KVStore([None, 4, None, 4], bucketed=False)
    store.chain(9)
    masks = [cache.make_mask(9, return_array=True) for cache in store.caches]
    assert masks[0] is masks[2]
    assert masks[1] is masks[3]
    np.testing.assert_array_equal(causal(9, 0, None), as_mask(masks[0]))
    np.testing.assert_array_equal(causal(9, 0, 4), as_mask(masks[1]))
    store.chain(9)
    assert as_mask(store.caches[0].make_mask(9, return_array=True)).shape == (9, 18)


def test_a_mask_of_another_size_is_an_error() -> None:
    """A model that asks for a mask of other tokens than those of the pass is told so."""
    store = KVStore([None], bucketed=False)
    store.chain(3)
    with pytest.raises(ValueError, match="a mask of 4 tokens, the pass has 3"):
        store.caches[0].make_mask(4)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("family", SLOTTED)
def test_models_compute_the_same_with_slots(family: str, *, bucketed: bool) -> None:
    """Chains, rewinds and single tokens through slots give the logits of mlx-lm's caches."""
    module = reference(family).module
    tokens: list[int] = np.random.default_rng(3).integers(4, 280, 3 * WINDOW).tolist()
    [expected] = reference(family).rows([tokens])
    store = KVStore(windows_of(module), bucketed=bucketed)
    for start, end, kept in ((0, 5, 5), (5, 17, 9), (9, 10, 10), (10, 13, 13), (13, 24, 24)):
        store.chain(end - start)
        logits = module(mx.array([tokens[start:end]]), cache=store.caches)[0]
        np.testing.assert_allclose(expected[start:end], np.array(logits), atol=2e-4)
        store.trim(kept)
    store.evaluate()


def test_windows_are_those_of_the_layers() -> None:
    """Full layers have no window; sliding ones have mlx-lm's."""
    assert windows_of(reference("llama").module) == [None, None, None]
    assert windows_of(reference("sliding").module) == [None, WINDOW, None]
    assert windows_of(reference("gemma3").module) == [WINDOW, None, WINDOW]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_recurrent_models_cannot_be_rewound(family: str) -> None:
    """A layer with another kind of state is a ModelError that names it."""
    module = reference(family).module
    if family in RECURRENT:
        with pytest.raises(
            ModelError, match="ArraysCache: such models verify drafts, but cannot draft"
        ):
            windows_of(module)
    else:
        assert len(windows_of(module)) == len(make_prompt_cache(module))


def test_a_window_with_a_fixed_beginning_cannot_be_rewound() -> None:
    """A rotating cache that keeps its first tokens is not a plain sliding window."""

    class Model:
        keep = 0

        def make_cache(self) -> list[Any]:
            rotating: Any = RotatingKVCache
            return [rotating(max_size=WINDOW, keep=self.keep)]

    model = Model()
    assert windows_of(model) == [WINDOW]
    model.keep = 4
    with pytest.raises(ModelError, match="RotatingKVCache: such models"):
        windows_of(model)
