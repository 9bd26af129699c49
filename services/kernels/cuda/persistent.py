"""A chain of draft tokens in one launch, on CUDA.

A drafter's pass computes little and waits for its launches: two dozen, 0.9 ms of the host for each
token. Here one kernel drafts a whole chain. Its blocks stay on the device from the first token to
the last, and wait for each other where a pass would end one launch and begin the next. It reads the
call from host memory and writes each token there, so that MLX neither builds nor copies anything.

A block must not wait for one that does not fit on the device: there are as many as multiprocessors.
Should one be missing all the same, the others give up after a while, and `Unavailable` is raised.
"""

import functools
import importlib
import re
import struct
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.messages import Tokens
from services.kernels.cuda import pinned
from services.kernels.cuda.blocks import BlockKernels
from services.kernels.cuda.kernel import LANES, build
from services.kernels.cuda.product import Norm
from services.mlx.launching import launch

MOST_ROWS, MOST_DEPTHS = 8, 16
"""Tokens that are fed at once, and those drafted after them; as in persistent.cuh."""
MOST_PARTS, MOST_BLOCKS = 16, 1024
CALLED, COUNT, FIRST, DEPTHS, FED = range(5)
RULES = FED + MOST_ROWS
DONE, DRAFTED = 128, 130
"""Places in the box, as there."""
_BOX_WORDS = 192
_WARPS = 8
_DEADLINE_S = 2.0
"""Longest time until a token."""
_TEXTS = (
    "tile.cuh", "attention.cuh",
    "sampling/rule.cuh", "sampling/best.cuh", "sampling/guess.cuh",
    "early_product.cuh", "persistent.cuh",
)  # fmt: skip

_BODY = """
using Chain = Drafting<T, D, HEADS, KV_HEADS, ROTATED, WIDTH, HIDDEN, COLUMNS, KIND, WARPS>;
__shared__ Chain::Memory memory;
alignas(16) __shared__ T queries[TILE * D];
const Layer<T> layers[] = {LAYERS};
const Ends<T> ends = {embedding, gain, head, ids};
const unsigned long long box = (unsigned long long)(place[1]) << 32 | place[0];
auto& own = *reinterpret_cast<Chain::Own*>(const_cast<uint32_t*>(scratch));
Chain{memory, queries, own, ends, speeds, EPS, HEAD_EPS, SCALE, keys0_shape[2], int(blockIdx.x),
      int(gridDim.x)}
    .draft(layers, sizeof(layers) / sizeof(layers[0]), reinterpret_cast<unsigned*>(box));
if (blockIdx.x == 0 && threadIdx.x < 2) done[threadIdx.x] = previous[threadIdx.x];
"""


class Unavailable(RuntimeError):
    """The device did not answer in time."""


class ModelEnds(NamedTuple):
    """What a model has before and after its layers."""

    embedding: mx.array
    """[vocabulary, width]."""
    norm: Norm
    head: mx.array
    """[columns, width], perhaps padded."""
    ids: mx.array
    """[columns] int32, the token id of each column."""


class PersistentChain:
    """Drafts chains by one launch each.

    Args:
        blocks: all blocks of the model.
        ends: the rest of it.
        box: words of pinned memory, from `open_box`.
    """

    def __init__(
        self, blocks: Sequence[BlockKernels], ends: ModelEnds, box: npt.NDArray[np.uint32]
    ) -> None:
        self._blocks, self._ends, self._box = blocks, ends, box.data.cast("B").cast("I")
        self._place = mx.array(np.array(pinned.address_of(box), np.uint32))
        self._scratch = mx.zeros(self._count_words(), mx.uint32)
        self._previous = mx.zeros(2, mx.int32)
        mx.eval(self._scratch, self._previous)
        self._replays: dict[int, Any] = {}
        self._asked = 0

    def draft(
        self,
        buffers: Sequence[tuple[mx.array, mx.array]],
        first: int,
        tokens: Tokens,
        rules: npt.NDArray[np.uint32],
        kind: int,
    ) -> Iterator[tuple[int, float]]:
        """Yield the token of each depth, and its confidence, as soon as it is chosen.

        Args:
            buffers: keys and values of each layer, [1, kv heads, slots, size], written in place:
                these tokens and the drafted ones but the last go to slots from `first` on.
            first: position and slot of the first of the tokens.
            tokens: those fed after the ones before, up to `MOST_ROWS`.
            rules: [depths, WORDS] of the tokens to be chosen, up to `MOST_DEPTHS`.
            kind: of the rules (`sampling.guess`).

        Raises:
            Unavailable: the device does not answer.
        """
        self._await(0)  # an abandoned chain may not have read its call
        depths, box = len(rules), self._box
        box[COUNT], box[FIRST], box[DEPTHS] = len(tokens), first, depths
        box[CALLED] = self._asked
        for at, token in enumerate(tokens, FED):
            box[at] = token
        words = rules.ravel().tolist()
        struct.pack_into(f"{len(words)}I", box, 4 * RULES, *words)
        self._asked = (self._asked + depths) % 2**32
        if kind not in self._replays:
            self._replays[kind] = mx.compile(partial(self._launch, kind))
        keys, values = map(list, zip(*buffers, strict=True))
        self._previous = self._replays[kind](keys, values, self._previous)
        launch(self._previous)
        for at in range(1, depths + 1):
            self._await(depths - at)
            word = DRAFTED + 2 * at
            yield box[word], struct.unpack_from("f", box, 4 * word + 4)[0]

    def _await(self, left: int) -> None:
        """Wait until at most `left` of the requested tokens are missing."""
        box, asked = self._box, self._asked
        ends = time.perf_counter() + _DEADLINE_S
        while (asked - box[DONE]) % 2**32 > left:
            if time.perf_counter() > ends:
                raise Unavailable(f"no token of a chain came within {_DEADLINE_S} s")

    def _count_words(self) -> int:
        """Return the size of `Scratch` in persistent.cuh, or a little more."""
        heads, weights, ends = self._blocks[0].heads, self._blocks[0].weights, self._ends
        width, hidden = ends.embedding.shape[1], weights.down.shape[1]
        row = width + weights.qkv.shape[0] + heads.heads * heads.size + hidden
        numbers = MOST_ROWS * row + ends.ids.size
        parts = MOST_PARTS * MOST_ROWS * heads.heads * (heads.size + 2)
        rotations, best = MOST_ROWS * heads.size, 4 * MOST_BLOCKS
        return _BOX_WORDS + best + rotations + parts + -(-numbers * ends.head.dtype.size // 4)

    def _launch(
        self, kind: int, keys: list[mx.array], values: list[mx.array], previous: mx.array
    ) -> mx.array:
        ends, first = self._ends, self._blocks[0]
        inputs = {
            "embedding": ends.embedding, "gain": ends.norm.gain, "head": ends.head,
            "ids": ends.ids, "speeds": first.heads.speeds, "place": self._place,
            "scratch": self._scratch, "previous": previous,
        }  # fmt: skip
        layers: list[str] = []
        for at, block in enumerate(self._blocks):
            own = {**block.weights._asdict(), "keys": keys[at], "values": values[at]}
            names = [
                f"{name}{at}" if array is not None else "nullptr" for name, array in own.items()
            ]
            inputs |= {f"{name}{at}": array for name, array in own.items() if array is not None}
            names[-2:] = [f"const_cast<T*>({name})" for name in names[-2:]]
            layers.append("{" + ", ".join(names) + "}")
        heads = first.heads
        head_eps = 0.0 if heads.norm is None else heads.norm.eps
        words = {
            "LAYERS": ",\n".join(layers), "EPS": f"{float(ends.norm.eps)!r}f",
            "HEAD_EPS": f"{float(head_eps)!r}f", "SCALE": f"{float(first.scale)!r}f",
        }  # fmt: skip
        body = re.sub("|".join(map(r"\b{}\b".format, words)), lambda word: words[word[0]], _BODY)
        make = build(_TEXTS, body, tuple(inputs), contiguous=True, outputs=("done",))
        [done] = make(
            inputs=list(inputs.values()),
            template=[
                ("T", ends.head.dtype), ("D", heads.size), ("HEADS", heads.heads),
                ("KV_HEADS", heads.kv_heads), ("ROTATED", heads.rotated),
                ("WIDTH", ends.embedding.shape[1]), ("HIDDEN", first.weights.down.shape[1]),
                ("COLUMNS", ends.ids.size), ("KIND", kind), ("WARPS", _WARPS),
            ],
            grid=(count_blocks() * _WARPS * LANES, 1, 1),
            threadgroup=(_WARPS * LANES, 1, 1),
            output_shapes=[(2,)],
            output_dtypes=[mx.int32],
        )  # fmt: skip
        return done


def open_box() -> npt.NDArray[np.uint32]:
    """Return the words of a box; raises OSError if there is no such memory here."""
    return pinned.allocate(4 * _BOX_WORDS).view(np.uint32)


@functools.cache
def count_blocks() -> int:
    """Return the number of multiprocessors of the device."""
    runtime: Any = importlib.import_module("cuda.bindings.runtime")
    kind = runtime.cudaDeviceAttr.cudaDevAttrMultiProcessorCount
    status, count = runtime.cudaDeviceGetAttribute(kind, 0)
    if int(status):
        raise OSError(f"the number of multiprocessors is unknown: {status}")
    return min(int(count), MOST_BLOCKS)
