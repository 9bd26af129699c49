"""Attention of a few queries on CUDA, by our own kernel.

MLX has a fused kernel for a single query without a mask, and cuDNN for many queries with one. A
verification and a depth of a draft tree lie between: with cuDNN each layer costs the host 75
microseconds, which for a large model is a third of the pass (docs/lab/cuda-forward.md).

One block serves sixteen queries of heads that share keys, on the tensor cores. Its warps take
sixteen keys in turn, each keeping a running maximum, sum and weighted values (the online softmax of
Milakov and Gimelshein, 2018), and are merged at the end. Sums are in float32, weights in the type
of the values. After a long text a few blocks would leave most of the GPU idle: there each block
serves a fixed part of the keys, and another kernel merges the parts. Rows of a table
(`attend_table`) have the same parts, and so the same bits.
"""

import functools
from typing import Any

import mlx.core as mx

from services.engine.batch import MOST_SLOTS
from services.kernels.cuda.kernel import LANES, build
from services.mlx.selftest import is_right

MOST_ROWS = 32
_MOST_SLOTS = {64: MOST_SLOTS, 128: MOST_SLOTS, 256: 512}
"""Maximum rows times slots for our kernel, by head size (docs/lab/cuda-forward.md)."""
_SHORT, _MOST_READ = 1024, 8192 * 4096
"""Up to this many slots, and this product of queries, slots and the width of all heads, our kernel
is cheaper than cuDNN's plans, which take 50 to 850 ms for each new shape.
"""
_FEW = 64
_SLOTS_STEP = 256
"""Buffers grow by this many slots."""
ROWS_STEP = 128
"""Padded numbers of rows are multiples of this (`round_rows`)."""
_WARPS = {64: 8, 128: 8, 256: 4}
"""Warps of a block by head size; a block must fit into shared memory."""
_TILE = 16
"""Queries of a block."""
_PART = 512
"""Keys of a block after a long text, near its beginning (`begin_part`)."""
_SHORT_PARTS, _MANY_HEADS = 8, 8
"""Number of parts of that length; four times as many if there are fewer KV heads, whose blocks
would leave most of the GPU idle if they were long (docs/lab/cuda-forward.md).
"""
_MERGE_WARPS = 4
_TYPES = (mx.float16, mx.bfloat16)


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """Compute [1, heads, n, size] attention, or return None where MLX's own kernels are better.

    Args:
        queries: [1, heads, n, size].
        keys: [1, kv heads, slots, size], as values; the last axis of both is contiguous.
        scale: factor of the products.
        mask: the slots each query attends to, bool [n, slots]; no other kind is supported.
    """
    if not isinstance(mask, mx.array) or not _takes(queries, keys, values, mask):
        return None
    if not _works(queries.dtype, queries.shape[-1]):
        return None
    return _attend_alone(queries, keys, values, scale, mask)


def attends_any_length(size: int, dtype: mx.Dtype) -> bool:
    """Return True if our kernel serves heads of this size in buffers of all traced sizes."""
    long = _MOST_SLOTS.get(size, 0) >= MOST_SLOTS and dtype in _TYPES
    return long and _works(dtype, size)


def count_parts(slots: int, kv_heads: int = 1) -> int:
    """Return the number of parts for this many keys; more parts for few KV heads."""
    short = _count_short(kv_heads)
    short_end, double_end = short * _PART, 2 * short * _PART
    if slots <= short_end:
        return -(-slots // _PART)
    if slots <= double_end:
        return short - (short_end - slots) // (2 * _PART)
    return short + short // 2 - (double_end - slots) // (4 * _PART)


def _count_short(kv_heads: int) -> int:
    return _SHORT_PARTS if kv_heads >= _MANY_HEADS else 4 * _SHORT_PARTS


def fit_chunk(model: Any, size: int, length: int) -> int:
    """Return the tokens of a prompt chunk after `length` others: few if our kernel serves them.

    A large chunk is one pass, but its shapes are new with every prompt (see `round_rows`).

    Args:
        model: an mlx-lm model; its heads together are assumed as wide as its states.
        size: requested number of tokens.
        length: tokens before them.
    """
    width = getattr(getattr(model, "args", None), "hidden_size", 0)
    slots = -(-(length + min(size, _FEW)) // _SLOTS_STEP) * _SLOTS_STEP
    fits = slots <= _SHORT and 0 < _FEW * slots * width <= _MOST_READ
    return min(size, _FEW) if fits else size


def round_rows(count: int) -> int:
    """Round up a number of rows, so that few different ones occur.

    A GPU plans or loads kernels for 50 to 80 ms when it first sees one (docs/lab/concurrency.md).
    """
    return 1 << (count - 1).bit_length() if count <= _FEW else -(-count // ROWS_STEP) * ROWS_STEP


def attend_many(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """Compute [1, heads, n, size] attention by MLX, padded to a recurring number of queries.

    Returns None if no padding is needed. Arguments as for `attend`.
    """
    batch, _, count, _ = queries.shape
    more, slots = round_rows(count) - count, keys.shape[2]
    if not isinstance(mask, mx.array) or mask.shape != (count, slots):
        return None
    if not more or batch > 1 or _is_small(queries, slots):
        return None
    out: mx.array = mx.fast.scaled_dot_product_attention(
        mx.pad(queries, [(0, 0), (0, 0), (0, more), (0, 0)]),
        keys,
        values,
        scale=scale,
        mask=mx.pad(mask, [(0, more), (0, 0)], constant_values=True),
    )
    return out[:, :, :count]


def _takes(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> bool:
    batch, _, count, size = queries.shape
    slots = keys.shape[2]
    return (
        batch == 1
        and _is_small(queries, slots)
        and size in _WARPS
        and queries.dtype in _TYPES
        and keys.dtype == values.dtype == queries.dtype
        and keys.shape[-1] == size
        and keys.shape == values.shape
        and mask.dtype == mx.bool_
        and mask.shape == (count, slots)
    )


def _is_small(queries: mx.array, slots: int) -> bool:
    """Return True if our kernel is better than MLX's for this many queries and slots."""
    _, _, rows, size = queries.shape
    few = rows <= MOST_ROWS and slots <= _MOST_SLOTS.get(size, 0)
    return few or (slots <= _SHORT and queries.size * slots <= _MOST_READ)


def _attend_alone(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """Compute `attend` if our kernel is supported."""
    arrays = {"q": queries, "k": keys, "v": values, "mask": mask}
    _, kv_heads, slots, size = keys.shape
    _, heads, count, _ = queries.shape
    group = heads // kv_heads
    parts, tiles = count_parts(slots, kv_heads), -(-group * count // _TILE)
    if parts == 1:
        grid, shape = (kv_heads, tiles, 1), (1, count, heads, size)
        return _launch(_SOURCE, scale, arrays, grid, shape).swapaxes(1, 2)
    grid, of_parts = (kv_heads, tiles, parts), (parts, count, heads, size + 2)
    return _merge(_launch(_PART_SOURCE, scale, arrays, grid, of_parts), queries.dtype)


def _launch(
    source: str,
    scale: float,
    inputs: dict[str, mx.array],
    blocks: tuple[int, int, int],
    found: tuple[int, int, int, int],
) -> mx.array:
    """Launch this kernel; its inputs have their names in the source.

    Args:
        source: of the kernel.
        scale: factor of the products; a constant of the kernel, since a block would wait for it.
        inputs: by name.
        blocks: grid size; the first axis is the number of KV heads.
        found: shape of the result. Tokens come before heads: the model's next step needs the
            heads of a token next to each other.
    """
    queries = inputs["q"]
    size, group = queries.shape[3], queries.shape[1] // blocks[0]
    warps, is_whole = _WARPS[size], found[3] == size
    body = source.replace("SCALE", f"{float(scale)!r}f")
    constants = [("D", size), ("WARPS", warps), ("GROUP", group)]
    constants += [] if is_whole else [("KEYS", _PART), ("SHORT", _count_short(blocks[0]))]
    out = build(("tile.cuh", "attention.cuh"), body, tuple(inputs), contiguous=False)(
        inputs=list(inputs.values()),
        template=[("T", queries.dtype), *constants],
        grid=(blocks[0] * warps * LANES, *blocks[1:]),
        threadgroup=(warps * LANES, 1, 1),
        output_shapes=[found],
        output_dtypes=[queries.dtype if is_whole else mx.float32],
    )
    return out[0]


def _merge(parts: mx.array, dtype: mx.Dtype) -> mx.array:
    """Merge [parts, count, heads, size + 2] into [1, heads, count, size]."""
    _, count, heads, numbers = parts.shape
    size = numbers - 2
    out = build(("tile.cuh", "attention.cuh"), _MERGE_SOURCE, ("parts",), contiguous=False)(
        inputs=[parts],
        template=[("T", dtype), ("D", size), ("WARPS", _MERGE_WARPS)],
        grid=(count * heads * _MERGE_WARPS * LANES, 1, 1),
        threadgroup=(_MERGE_WARPS * LANES, 1, 1),
        output_shapes=[(1, count, heads, size)],
        output_dtypes=[dtype],
    )
    return out[0].swapaxes(1, 2)


def attend_table(  # noqa: PLR0917  # `kv_rows.Attend`
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    first: mx.array,
    scale: float,
) -> mx.array:
    """Compute [1, heads, rows, size] attention of rows that attend to different sequences' slots.

    Args:
        queries: [1, heads, rows, size].
        keys: [kv heads, all slots, size], as values; the last axis of both is contiguous.
        mask: bool [rows, slots], the slots each query attends to, counted from its first.
        first: [rows] int32, the first slot of its sequence.
        scale: factor of the products.

    Raises:
        TypeError: the kernel does not support arrays of this kind.
    """
    size = queries.shape[-1]
    ours = size in _WARPS and queries.dtype in _TYPES and keys.dtype == queries.dtype
    if not ours or not _works(queries.dtype, size):
        raise TypeError(f"no attention over a table for {queries.dtype} of size {size}")
    arrays = {"q": queries, "k": keys, "v": values, "mask": mask, "first": first}
    return _attend_seats(arrays, scale)


def _attend_seats(arrays: dict[str, mx.array], scale: float) -> mx.array:
    """Compute `attend_table`, if supported; the arrays have their names in the source."""
    queries, kv_heads = arrays["q"], arrays["k"].shape[0]
    _, heads, count, size = queries.shape
    parts, tiles = count_parts(arrays["mask"].shape[1], kv_heads), -(-(heads // kv_heads) // _TILE)
    if parts == 1:
        blocks, shape = (kv_heads, tiles, count), (1, count, heads, size)
        return _launch(_TABLE_SOURCE, scale, arrays, blocks, shape).swapaxes(1, 2)
    blocks, of_parts = (kv_heads, count * tiles, parts), (parts, count, heads, size + 2)
    return _merge(_launch(_TABLE_PART_SOURCE, scale, arrays, blocks, of_parts), queries.dtype)


_ALONE = """
const int head = blockIdx.x, heads = gridDim.x * GROUP, first = {first};
__shared__ Left<D, WARPS> left;
attend_tile<T, D, WARPS, GROUP>(
    left, q + head * GROUP * q_strides[1], q_strides[1], q_strides[2], q_strides[3],
    k + head * k_strides[1], k_strides[2], v + head * v_strides[1], v_strides[2],
    Mask{{mask, mask_strides[0], mask_strides[1]}}, q_shape[2], blockIdx.y, first, {end}, SCALE,
    {to});
"""
_SOURCE = _ALONE.format(
    first="0", end="k_shape[2]", to="Result<T, D>{out + head * GROUP * D, heads * D}"
)
_PART_SOURCE = """
// The longest parts are the last ones: they begin first.
const int part = gridDim.z - 1 - blockIdx.z;
""" + _ALONE.format(
    first="begin_part(part, KEYS, SHORT)",
    end="min(begin_part(part + 1, KEYS, SHORT), int(k_shape[2]))",
    to="Part<D>{out + (long(part) * q_shape[2] * heads + head * GROUP) * Part<D>::NUMBERS, "
    "heads * Part<D>::NUMBERS}",
)

_MERGE_SOURCE = """
constexpr int NUMBERS = Part<D>::NUMBERS;
merge_parts<T, D, WARPS>(parts + long(blockIdx.x) * NUMBERS, parts_shape[0],
                         long(gridDim.x) * NUMBERS, out + long(blockIdx.x) * D);
"""

_OF_TABLE = """
const long at = first[row];
__shared__ Left<D, WARPS> left;
attend_tile<T, D, WARPS, GROUP>(
    left, q + head * GROUP * q_strides[1] + row * q_strides[2],
    q_strides[1], q_strides[2], q_strides[3],
    k + head * k_strides[0] + at * k_strides[1], k_strides[1],
    v + head * v_strides[0] + at * v_strides[1], v_strides[1],
    Mask{{sees, mask_strides[0], mask_strides[1]}}, 1, {tile}, {begin}, {end}, SCALE,
    {to});
"""
_TABLE_SOURCE = """
const int head = blockIdx.x, heads = gridDim.x * GROUP, row = blockIdx.z;
const bool* sees = mask + row * mask_strides[0];
""" + _OF_TABLE.format(
    tile="blockIdx.y",
    begin="0",
    end="mask_shape[1]",
    to="Result<T, D>{out + (long(row) * heads + head * GROUP) * D, 0}",
)
_TABLE_PART_SOURCE = """
const int head = blockIdx.x, heads = gridDim.x * GROUP, rows = q_shape[2];
const int row = blockIdx.y % rows, part = gridDim.z - 1 - blockIdx.z;
const bool* sees = mask + row * mask_strides[0];
const int begin = begin_part(part, KEYS, SHORT);
const int end = min(begin_part(part + 1, KEYS, SHORT), int(mask_shape[1]));
// A text that is shorter than others has nothing in the later parts.
bool is_seen = false;
for (int key = begin + threadIdx.x; key < end; key += blockDim.x)
  is_seen |= sees[key * mask_strides[1]];
is_seen = __syncthreads_or(is_seen);
""" + _OF_TABLE.format(
    tile="blockIdx.y / rows",
    begin="begin",
    end="is_seen ? end : begin",
    to="Part<D>{out + ((long(part) * rows + row) * heads + head * GROUP) * Part<D>::NUMBERS, 0}",
)


@functools.cache
def _works(dtype: mx.Dtype, size: int) -> bool:
    """Return True if the kernels compile here and match MLX's own attention."""
    # With 32 parts a lane reads several; with many heads the last ones are longer.
    shapes = ((70, 2), (_PART + 70, 2), (33 * _PART, 2), (34 * _PART, _MANY_HEADS))
    inputs = [_make_inputs(dtype, size, *shape) for shape in shapes]
    return is_right("attention of few queries", "attention", _attend_by_mlx, _attend_both, inputs)


def _make_inputs(dtype: mx.Dtype, size: int, slots: int, kv_heads: int) -> tuple[mx.array, ...]:
    """Return queries, keys, values and a mask, laid out as in a model.

    Keys are the first slots of larger buffers, and the heads of a query are next to each other.
    """
    shape = (1, kv_heads, slots + 26, size)
    queries, keys, values = (
        mx.random.normal(shape, dtype, key=mx.random.key(seed))
        for seed, shape in enumerate([(1, 3, 2 * kv_heads, size), shape, shape])
    )
    mask = mx.arange(slots)[None] <= mx.array([[slots - 30], [slots - 4], [slots - 1]])
    return queries.swapaxes(1, 2), keys[..., :slots, :], values[..., :slots, :], mask


def _attend_by_mlx(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> list[mx.array]:
    scale = 0.7 * q.shape[-1] ** -0.5
    return [mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)] * 2


def _attend_both(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> list[mx.array]:
    """Attend alone, and with the first slots of the keys as the seat of all rows in a table."""
    scale = 0.7 * q.shape[-1] ** -0.5
    arrays = {"q": q, "k": k[0], "v": v[0], "mask": mask, "first": mx.zeros(3, mx.int32)}
    return [_attend_alone(q, k, v, scale, mask), _attend_seats(arrays, scale)]
