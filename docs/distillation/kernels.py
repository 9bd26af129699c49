"""One token of thousands of rows, each at a place of its own: kernels in Triton.

`plain.py` has the same functions.
"""

import torch
import triton
import triton.language as tl

Pair = tuple[torch.Tensor, torch.Tensor]


def rotate(
    qkv: torch.Tensor, turns: Pair, place: torch.Tensor, kept: Pair, heads: int
) -> torch.Tensor:
    """[rows, heads, size] queries; keys and values are written at `place` of each row."""
    _, kv_heads, length, size = kept[0].shape
    queries = qkv.new_empty((len(qkv), heads, size))
    rotate_and_keep[(len(qkv), heads + 2 * kv_heads)](
        qkv, *turns, place, queries, *kept, length,
        heads=heads, kv_heads=kv_heads, half=size // 2, num_warps=1,
    )  # fmt: skip
    return queries


def attend(queries: torch.Tensor, kept: Pair, place: torch.Tensor) -> torch.Tensor:
    """[rows, heads, size]: each row's queries over its keys up to `place`."""
    rows, kv_heads, length, size = kept[0].shape
    out = torch.empty_like(queries)
    attend_rows[(rows, kv_heads)](
        queries, *kept, place, out, length, size**-0.5,
        group=queries.shape[1] // kv_heads, kv_heads=kv_heads, size=size, block=64, num_warps=4,
    )  # fmt: skip
    return out


def choose(logits: torch.Tensor, heat: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """[rows] int64, samples at temperatures `heat`."""
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    choose_rows[(len(logits),)](
        logits, heat, seed, chosen, logits.shape[1], block=4096, num_warps=8
    )
    return chosen


@triton.jit
def rotate_and_keep(
    qkv, cos, sin, place, queries, keys, values, length,
    heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys by their row's place; keys and values go to the cache."""
    row, head = tl.program_id(0), tl.program_id(1)
    size: tl.constexpr = 2 * half
    at = tl.load(place + row)
    column = tl.arange(0, half)
    source = qkv + (row * (heads + 2 * kv_heads) + head) * size + column
    first, second = tl.load(source).to(tl.float32), tl.load(source + half).to(tl.float32)
    if head < heads + kv_heads:
        c, s = tl.load(cos + at * half + column), tl.load(sin + at * half + column)
        first, second = first * c - second * s, second * c + first * s
    if head < heads:
        out = queries + (row * heads + head) * size + column
    elif head < heads + kv_heads:
        out = keys + ((row * kv_heads + head - heads).to(tl.int64) * length + at) * size + column
    else:
        kv = row * kv_heads + head - heads - kv_heads
        out = values + (kv.to(tl.int64) * length + at) * size + column
    tl.store(out, first.to(out.dtype.element_ty))
    tl.store(out + half, second.to(out.dtype.element_ty))


@triton.jit
def attend_rows(
    queries, keys, values, place, out, length, scale,
    group: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One query of each head over the keys of its row; a KV head's queries together."""
    row, kv = tl.program_id(0), tl.program_id(1)
    end = tl.load(place + row) + 1
    member, column = tl.arange(0, 16), tl.arange(0, size)
    at = (row * kv_heads + kv) * group * size + member[:, None] * size + column[None]
    known = (member < group)[:, None]
    q = tl.load(queries + at, mask=known, other=0.0)
    start = (row * kv_heads + kv).to(tl.int64) * length * size
    best = tl.full((16,), -1e30, tl.float32)
    total = tl.zeros((16,), tl.float32)
    sums = tl.zeros((16, size), tl.float32)
    for begin in range(0, end, block):
        slot = begin + tl.arange(0, block)
        there = slot < end
        of_slot = start + slot[:, None] * size + column[None]
        k = tl.load(keys + of_slot, mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)).to(tl.float32) * scale
        scores = tl.where(there[None], scores, -1e30)
        new = tl.maximum(best, tl.max(scores, 1))
        shrunk, weight = tl.exp(best - new), tl.exp(scores - new[:, None])
        v = tl.load(values + of_slot, mask=there[:, None], other=0.0)
        sums = sums * shrunk[:, None] + tl.dot(weight.to(v.dtype), v)
        total = total * shrunk + tl.sum(weight, 1)
        best = new
    tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=known)


@triton.jit
def choose_rows(logits, temperature, seed, chosen, vocabulary, block: tl.constexpr):
    """The token of the greatest logit, Gumbel noise times the temperature added."""
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    best, token = tl.full((), -1e30, tl.float32), tl.full((), 0, tl.int32)
    for begin in range(0, vocabulary, block):
        column = begin + tl.arange(0, block)
        at = row.to(tl.int64) * vocabulary + column
        score = tl.load(logits + at, mask=column < vocabulary, other=-1e30).to(tl.float32)
        if heat > 0:
            # Gumbel noise is -log of an exponential number, which is exact near 0 like this.
            chance = tl.maximum(tl.rand(tl.load(seed), row * vocabulary + column), 4e-10)
            small = chance + 0.5 * chance * chance
            rare = tl.where(chance < 1e-3, small, -tl.log(1 - tl.minimum(chance, 0.9999999)))
            score -= heat * tl.log(rare)
        here = tl.max(score, 0)
        token = tl.where(here > best, begin + tl.argmax(score, 0), token)
        best = tl.maximum(best, here)
    tl.store(chosen + row, token)
