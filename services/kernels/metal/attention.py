"""Attention of a few queries to many keys, on Metal, in one read of the keys.

MLX's kernel for a few queries reads the keys once for each of them. Here eight rows (queries of the
heads that share keys) are computed together (`attention.metal`). Each chunk of the keys has its own
threadgroups, and a second kernel merges them. A row's sums depend neither on the other rows, nor on
keys that it does not attend to.
"""

import functools

import mlx.core as mx

from services.kernels.metal.kernel import LANES, build, launch

SIZES = (64, 96, 128)
"""Head sizes: with larger ones queries and values would not fit into registers."""
TYPES = (mx.float16, mx.bfloat16)
MOST_QUERIES = 16

_CHUNK = 256
"""Keys of one threadgroup."""
_SPLIT = 4
"""Simdgroups that share a chunk."""
_TILE = 8

_BODY = """
threadgroup float maxima[SPLIT * 8], totals[SPLIT * 8], parts[SPLIT * 8 * D];
const int kv = threadgroup_position_in_grid.x, chunk = threadgroup_position_in_grid.y;
const int first = threadgroup_position_in_grid.z * 8;
const int queries = q_shape[2], heads = q_shape[1], keys = k_shape[2];
attend<T, D, GROUP, SPLIT, SEES>(
    q + kv * GROUP * q_strides[1], q_strides[1], q_strides[2], q_strides[3],
    k + kv * k_strides[1], k_strides[2], v + kv * v_strides[1], v_strides[2],
    mask, mask_strides[0], mask_strides[1], queries, keys, chunk * CHUNK,
    min(keys, (chunk + 1) * CHUNK), first, scale[0], simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup, maxima, totals, parts);
for (int e = thread_index_in_threadgroup; e < 8 * D; e += 32 * SPLIT) {
  const int row = first + e / D;
  if (row >= GROUP * queries) break;
  const Merged merged =
      merge(maxima + e / D, totals + e / D, 8, parts + e, size_t(8 * D), SPLIT);
  // Tokens first: the model's next step wants the heads of a token side by side.
  const size_t at = size_t(row / GROUP) * heads + kv * GROUP + row % GROUP;
"""
_WHOLE = """
  out[at * D + e % D] = T(quotient(merged));
}
"""
_PART = """
  const size_t place = size_t(chunk) * queries * heads + at;
  values[place * D + e % D] = merged.value;
  if (e % D == 0) {
    highest[place] = merged.highest;
    sums[place] = merged.total;
  }
}
"""
_MERGE = """
const int at = threadgroup_position_in_grid.x, i = thread_index_in_threadgroup;
const int chunks = highest_shape[0], rows = highest_shape[1];
const Merged merged = merge(
    highest + at, sums + at, rows, values + size_t(at) * D + i, size_t(rows) * D, chunks);
out[size_t(at) * D + i] = T(quotient(merged));
"""
_ALL, _CAUSAL, _MASKED = range(3)


def takes(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Return True if the kernel supports this call; see `attend`."""
    batch, heads, count, size = queries.shape
    slots = keys.shape[2]
    if isinstance(mask, mx.array):
        # MLX passes very small arrays in another address space.
        fits = mask.dtype == mx.bool_ and mask.shape == (count, slots) and mask.size >= _TILE
    else:
        fits = count <= slots and (mask == "causal" or mask is None)
    return (
        fits
        and batch == keys.shape[0] == 1
        and count <= MOST_QUERIES
        and size in SIZES
        and queries.dtype in TYPES
        and keys.dtype == values.dtype == queries.dtype
        and keys.shape == values.shape
        and keys.shape[-1] == size
        and heads % keys.shape[1] == 0
    )


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Compute [1, heads, n, size] attention for a call that `takes` accepts.

    Args:
        queries: [1, heads, n, size].
        keys: [1, kv heads, slots, size], as values; the last axis of both is contiguous.
        scale: factor of the products.
        mask: the slots each query attends to: bool [n, slots], "causal", or None for all.
    """
    _, heads, count, size = queries.shape
    chunks = -(-keys.shape[2] // _CHUNK)
    dtype = queries.dtype
    if chunks == 1:
        body, shape = _BODY + _WHOLE, (1, count, heads, size)
        outputs = _run(body, ("out",), [(shape, dtype)], (queries, keys, values), scale, mask)
        return outputs[0].swapaxes(1, 2)
    names = ("values", "highest", "sums")
    each = (chunks, count * heads)
    shapes = [((*each, size), mx.float32), (each, mx.float32), (each, mx.float32)]
    parts = _run(_BODY + _PART, names, shapes, (queries, keys, values), scale, mask)
    outputs = launch(
        build("attention.metal", _MERGE, names, ("out",)),
        parts,
        template={"T": dtype, "D": size},
        groups=(count * heads, 1, 1),
        threads=size,
        outputs=[((1, count, heads, size), dtype)],
    )
    return outputs[0].swapaxes(1, 2)


def _run(  # noqa: PLR0917
    body: str,
    names: tuple[str, ...],
    outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    arrays: tuple[mx.array, mx.array, mx.array],
    scale: float,
    mask: mx.array | str | None,
) -> list[mx.array]:
    """Run the kernel over all chunks of the keys, with one ending of its body or the other."""
    queries, keys, _ = arrays
    _, heads, count, size = queries.shape
    kv_heads, slots = keys.shape[1:3]
    given = isinstance(mask, mx.array)
    return launch(
        build("attention.metal", body, ("q", "k", "v", "mask", "scale"), names),
        [*arrays, mask if isinstance(mask, mx.array) else _no_mask(), _on_device(scale)],
        template={
            "T": queries.dtype,
            "D": size,
            "GROUP": heads // kv_heads,
            "SPLIT": _SPLIT,
            "SEES": _MASKED if given else _ALL if mask is None else _CAUSAL,
            "CHUNK": _CHUNK,
        },
        groups=(kv_heads, -(-slots // _CHUNK), -(-(heads // kv_heads * count) // _TILE)),
        threads=_SPLIT * LANES,
        outputs=outputs,
    )


@functools.cache
def _on_device(scale: float) -> mx.array:
    return mx.array([scale], mx.float32)


@functools.cache
def _no_mask() -> mx.array:
    # Not `mx.zeros`, which would become part of the first trace.
    return mx.array([[False] * _TILE] * _TILE)
