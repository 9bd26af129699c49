"""Branches of draft tokens in one launch, on CUDA.

A drafter's pass computes little and waits for its launches: two dozen, 0.9 ms of the host for each
token. Here one kernel drafts several branches to their ends. Its blocks stay on the device from the
first token to the last, and wait for each other where a pass would end one launch and begin the
next. It reads the call from host memory and writes each token there, so that MLX neither builds nor
copies anything.

A pass has a row of each branch, and the first one also those of the trunk that its store still
misses. A branch sees the trunk up to its fork, and its own tokens in scratch slots after the trunk,
where the slots of all branches take turns. A call's only branch may continue the trunk.

A block must not wait for one that does not fit on the device: there are as many as multiprocessors.
Should one be missing all the same, the others give up after a while, and `Unavailable` is raised.
"""

import functools
import importlib
import re
import struct
import time
from collections.abc import Sequence
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
from services.kernels.cuda.sampling.guess import CANDIDATES
from services.mlx.launching import launch

MOST_ROWS, MOST_DEPTHS = 16, 16
"""Rows of a pass, and the tokens of a branch; as in persistent.cuh."""
MOST_PARTS = MOST_SCANS = 16
NAMED = 8
"""Tokens named after each branch at each depth."""
CALLED, COUNT, FIRST, BRANCHES, DEPTHS, ORIGIN, STOPPED, FED = range(8)
FORKS = FED + MOST_ROWS
RULES = FORKS + MOST_ROWS
MOST_RULES = 48
DONE, FOUND = 352, 368
"""Places in the box, as there."""
FOUND_WORDS = NAMED + NAMED
BOX_WORDS = FOUND + MOST_DEPTHS * MOST_ROWS * FOUND_WORDS
_WARPS = 8
_DEADLINE_S = 2.0
"""Longest time until a token."""
_TEXTS = (
    "tile.cuh", "attention.cuh", "rotate.cuh",
    "sampling/rule.cuh", "sampling/best.cuh", "sampling/guess.cuh",
    "early_product.cuh", "persistent.cuh",
)  # fmt: skip

_BODY = """
using Branches = Drafting<T, D, HEADS, KV_HEADS, ROTATED, WIDTH, HIDDEN, COLUMNS, KIND, WARPS>;
__shared__ Branches::Memory memory;
alignas(16) __shared__ T queries[TILE * D];
const Layer<T> layers[] = {LAYERS};
const Ends<T> ends = {embedding, gain, head, ids};
const unsigned long long box = (unsigned long long)(place[1]) << 32 | place[0];
auto& own = *reinterpret_cast<Branches::Own*>(const_cast<uint32_t*>(scratch));
Branches{memory, queries, own, ends, speeds, EPS, HEAD_EPS, SCALE, keys0_shape[2], int(blockIdx.x),
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


class DraftCall(NamedTuple):
    """What is drafted."""

    first: int
    """Position and slot of the first token after those in the store."""
    trunk: Tokens
    """These tokens."""
    roots: Tokens
    """The first token of each branch; if empty, each token of the trunk begins one. Trunk and roots
    are up to `MOST_ROWS` together.
    """
    forks: Sequence[int]
    """The last slot of the trunk before each branch."""
    depths: int
    """Tokens to be chosen in each branch, up to `MOST_DEPTHS`."""

    @property
    def origin(self) -> int:
        """Position of the first token to be chosen."""
        return 2 + min(self.forks)

    @property
    def continues_trunk(self) -> bool:
        """True if the only branch follows the trunk's last token, so that its slots do, too."""
        return len(self.roots) == 1 and self.forks[0] == self.first + len(self.trunk) - 1

    @property
    def positions(self) -> int:
        """Number of positions for which tokens are chosen, up to `MOST_RULES`."""
        return max(self.forks) - min(self.forks) + self.depths

    @property
    def slots(self) -> int:
        """Slots that it needs, the store's included."""
        stride = 1 << max(0, len(self.roots) - 1).bit_length()
        return self.first + len(self.trunk) + stride * self.depths


class Named(NamedTuple):
    """Tokens that may follow, the most likely first."""

    tokens: Tokens
    confidences: list[float]


class RunningDraft:
    """The results of a call, read while it runs, and after another one has begun.

    Args:
        words: of the box, as floats.
        depths: of the call.
        kernel: the one that drafts.
    """

    def __init__(
        self, words: npt.NDArray[np.float32], depths: int, kernel: "PersistentKernel"
    ) -> None:
        self._words, self._depths, self._kernel = words, depths, kernel
        self._is_kept, self._readable = False, 0

    def read(self, depth: int, branches: int) -> list[Named]:
        """Return what is named after each of the `branches` at a depth; may raise Unavailable."""
        if depth >= self._readable:
            self._kernel.wait(self._depths - 1 - depth)
        first = FOUND + FOUND_WORDS * MOST_ROWS * depth
        words = self._words[first : first + FOUND_WORDS * branches].reshape(branches, 2, NAMED)
        tokens, confidences = words[:, 0].astype(np.int64).tolist(), words[:, 1].tolist()
        return [Named(*pair) for pair in zip(tokens, confidences, strict=True)]

    def stop(self) -> int:
        """End the draft after the present depth; return how many depths can be read from now on."""
        if not self._is_kept:  # else it ended before another one began
            self._readable = self._depths - self._kernel.stop()
        return self._readable

    def keep(self) -> None:
        """Keep what was found: the box gets other words."""
        self._words, self._is_kept, self._readable = self._words.copy(), True, self._depths


class PersistentKernel:
    """Drafts branches by one launch for all of them.

    Args:
        blocks: all blocks of the model.
        ends: the rest of it.
        box: words of pinned memory, from `open_box`.
    """

    def __init__(
        self, blocks: Sequence[BlockKernels], ends: ModelEnds, box: npt.NDArray[np.uint32]
    ) -> None:
        self._blocks, self._ends, self._box = blocks, ends, box.data.cast("B").cast("I")
        self._words = box.view(np.float32)
        self._place = mx.array(np.array(pinned.address_of(box), np.uint32))
        self._scratch = mx.zeros(self._count_words(), mx.uint32)
        self._previous = mx.zeros(2, mx.int32)
        mx.eval(self._scratch, self._previous)
        self._replays: dict[int, Any] = {}
        self._asked, self._running = 0, RunningDraft(self._words, 0, self)

    def start(
        self,
        buffers: Sequence[tuple[mx.array, mx.array]],
        call: DraftCall,
        rules: npt.NDArray[np.uint32],
        kind: int,
    ) -> "RunningDraft":
        """Begin to draft; raises Unavailable if the device does not answer.

        Args:
            buffers: keys and values of each layer, [1, kv heads, slots, size], written in place:
                the trunk's tokens in their slots, and all but the last of each branch after them.
            call: what is drafted.
            rules: [positions, WORDS] of the tokens to be chosen, from `call.origin` on.
            kind: of the rules (`sampling.guess`).
        """
        self.wait(0)  # an abandoned draft may not have read its call
        self._running.keep()
        self._box[CALLED] = self._asked
        write_call(self._box, call, rules)
        if kind not in self._replays:
            self._replays[kind] = mx.compile(partial(self._launch, kind))
        keys, values = map(list, zip(*buffers, strict=True))
        self._previous = self._replays[kind](keys, values, self._previous)
        launch(self._previous)
        self._asked = (self._asked + call.depths) % 2**32
        self._running = RunningDraft(self._words, call.depths, self)
        return self._running

    def wait(self, most: int) -> None:
        """Wait until at most `most` of the requested depths are missing; may raise Unavailable."""
        ends = time.perf_counter() + _DEADLINE_S
        while self._missing > most:
            if time.perf_counter() > ends:
                raise Unavailable(f"no token of a draft came within {_DEADLINE_S} s")

    def stop(self) -> int:
        """Have the kernel end after the present depth; return how many were missing before."""
        missing = self._missing
        self._box[STOPPED] = 1
        return missing

    @property
    def _missing(self) -> int:
        return int(self._asked - self._box[DONE]) % 2**32

    def _count_words(self) -> int:
        """Return the size of `Scratch` in persistent.cuh, or a little more."""
        heads, weights, ends = self._blocks[0].heads, self._blocks[0].weights, self._ends
        width, hidden = ends.embedding.shape[1], weights.down.shape[1]
        row = width + weights.qkv.shape[0] + heads.heads * heads.size + hidden
        numbers = MOST_ROWS * (row + ends.ids.size)
        parts = MOST_PARTS * MOST_ROWS * heads.heads * (heads.size + 2)
        rotations = MOST_ROWS * heads.size
        found = MOST_ROWS * (FOUND_WORDS + MOST_SCANS * (2 * CANDIDATES + 1))
        return FOUND + found + rotations + parts + -(-numbers * ends.head.dtype.size // 4)

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


def write_call(box: Any, call: DraftCall, rules: npt.NDArray[np.uint32]) -> None:
    """Write a call and the rules of its positions into the words of a box."""
    box[COUNT], box[FIRST], box[ORIGIN], box[STOPPED] = len(call.trunk), call.first, call.origin, 0
    box[BRANCHES], box[DEPTHS] = len(call.roots), call.depths
    tokens, words = [*call.trunk, *call.roots], rules.ravel().tolist()
    for at, word in (*enumerate(tokens, FED), *enumerate(call.forks, FORKS)):
        box[at] = word
    struct.pack_into(f"{len(words)}I", box, 4 * RULES, *words)


def open_box() -> npt.NDArray[np.uint32]:
    """Return the words of a box; raises OSError if there is no such memory here."""
    return pinned.allocate(4 * BOX_WORDS).view(np.uint32)


@functools.cache
def count_blocks() -> int:
    """Return the number of multiprocessors of the device."""
    runtime: Any = importlib.import_module("cuda.bindings.runtime")
    kind = runtime.cudaDeviceAttr.cudaDevAttrMultiProcessorCount
    status, count = runtime.cudaDeviceGetAttribute(kind, 0)
    if int(status):
        raise OSError(f"the number of multiprocessors is unknown: {status}")
    return int(count)
