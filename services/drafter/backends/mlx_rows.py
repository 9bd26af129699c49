"""Rows that advance together, one token per pass: by the model itself, or from traces.

A depth of a small drafter costs the host, which builds the graph, more than the GPU, which computes
it. Here a pass is replayed for a few numbers of rows and sizes of the KV buffers (`engine.trace`);
the slots and masks of the next pass are outputs next to the logits, so that nothing has to be sent
to the device between two passes.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from protocol.messages import Sampling
from services.engine.batch import Batch, Shape, Span, round_to_traced
from services.engine.trace import Trace, prefill
from services.kernels.cuda.blocks import serves_any_length
from services.kernels.cuda.sampling.guess import WIDTHS
from services.kernels.cuda.sampling.rules import write_rules
from services.kv.cache import KVStore, SlotCache
from services.mlx import selftest
from services.mlx.launching import launch
from services.runtime.preparation import Steps
from services.sampling.device import guess

TRACED_ROWS = (1, 8, 32)
"""Sizes that rows are padded to; larger ones are not traced."""
TRACED_SLOTS = (256, 512, 768, 1024)
"""Sizes of the buffers that are traced at load, as for verifications."""

_GREEDY, _DRAWN = Sampling(), Sampling(temperature=1.0)
_FILTERED = Sampling(temperature=1.0, top_p=0.9)
_TRIAL_PROMPT = 24
_TRIAL_DEPTHS = 4


class SideBySide(Protocol):
    """Tokens that advance together: each pass feeds one more after each."""

    count: int
    """Rows of a pass, padding included."""

    def feed(self, tokens: mx.array) -> mx.array:
        """Return lazy [count, head] logits after these [count] tokens."""
        ...


class PlainBranches:
    """Branches after a trunk, computed by the model itself.

    Args:
        model: the drafter's.
        store: holds their keys and values.
        span: of the first pass.
    """

    def __init__(self, model: Any, store: KVStore, span: Span) -> None:
        self._model, self._store, self._span = model, store, span
        self.count = span.count

    def feed(self, tokens: mx.array) -> mx.array:
        """Return logits of a pass over the branches; see `SideBySide`."""
        self._store.place(self._span)
        logits: mx.array = self._model(tokens[None], cache=self._store.caches)[0]
        self._span = self._span.following()
        return logits


class PlainChain:
    """A trunk that advances, computed by the model; the first pass may have several tokens."""

    count = 1

    def __init__(self, model: Any, store: KVStore) -> None:
        self._model, self._store = model, store

    def feed(self, tokens: mx.array) -> mx.array:
        """Return [tokens, head] logits; see `SideBySide`."""
        length = self._store.length
        self._store.chain(tokens.size)
        try:
            logits: mx.array = self._model(tokens[None], cache=self._store.caches)[0]
        except BaseException:
            self._store.trim(length)
            raise
        return logits


class TracedRows:
    """Replaces `PlainBranches`, or `PlainChain` if the row is the trunk, by a trace.

    Args:
        trace: of the model.
        store: holds their keys and values.
        span: of the first pass.
        shape: of the trace.
        depth: passes that the buffers have room for.
        is_trunk: True if the only row advances the trunk.
    """

    def __init__(
        self,
        trace: Trace,
        store: KVStore,
        span: Span,
        shape: Shape,
        *,
        depth: int,
        is_trunk: bool,
    ) -> None:
        self._left = depth
        self._trace, self._store, self._is_trunk = trace, store, is_trunk
        self.count = shape.rows
        self._stride = mx.array(span.count, mx.int32)
        self._place: Sequence[mx.array] = span.pad(shape.rows, shape.slots)
        store.widen(shape.slots)

    @property
    def has_room(self) -> bool:
        """True if another pass fits into the buffers."""
        return self._left > 0

    def feed(self, tokens: mx.array) -> mx.array:
        """Return logits of a replayed pass; see `SideBySide`."""
        if not self._left:
            # MLX does not check where it writes.
            raise IndexError("the buffers have no room for another pass")
        self._left -= 1
        batch = Batch(tokens[None], *self._place)
        replayed = self._trace(batch, self._store.caches, self._stride)
        self._place = replayed.following
        if self._is_trunk:
            self._store.chain(1)
        return replayed.logits[0]


class TracedPasses:
    """Passes over a drafter's rows, and the choices after them, traced at load.

    Args:
        model: called on tokens [1, n] and caches.
        head_size: columns of its logits that have a token.
        ids: [head] int32, their token ids.
    """

    def __init__(self, model: Any, head_size: int, ids: mx.array) -> None:
        self._model, self._size, self._ids = model, head_size, ids
        self._trace = Trace(model, columns=head_size, writes=False)
        self._choices: dict[tuple[int, bool], Any] = {}
        self._shapes: set[Shape] = set()
        self._traces_later = serves_any_length(model)
        """True if rows after longer texts are traced on demand."""

    def open(
        self, store: KVStore, span: Span, depth: int, *, is_trunk: bool = False
    ) -> TracedRows | None:
        """Open passes of rows from this span on; None if their shape has not been traced."""
        shape = self._find_shape(store, span, depth)
        if shape is None:
            return None
        return TracedRows(self._trace, store, span, shape, depth=depth, is_trunk=is_trunk)

    def _find_shape(self, store: KVStore, span: Span, depth: int) -> Shape | None:
        rows, keys = _pad(span.count), store.caches[0].keys
        if keys is None or any(_has_window(cache) for cache in store.caches):
            return None
        end = span.start + span.count * (depth - 1) + rows
        shape = Shape(rows, round_to_traced(max(keys.shape[2], end)))
        longest = Shape(rows, TRACED_SLOTS[-1])
        later = self._traces_later and shape.slots > longest.slots and longest in self._shapes
        return shape if later or shape in self._shapes else None

    def serves(self, store: KVStore, *, ahead: bool = False) -> bool:
        """Return True for passes of traced shapes; see `TracedPass`.

        Rows attend to their ancestors.
        """
        del ahead
        return self._find_shape(store, store.span, 1) is not None

    def __call__(self, tokens: mx.array, store: KVStore, *, ahead: bool = False) -> mx.array:
        """Run a replayed pass; see `TracedPass`."""
        del ahead
        count = store.span.count
        rows = self.open(store, store.span, 1)
        if rows is None:
            raise ValueError(f"a pass of {count} rows is not traced")
        padded = mx.pad(tokens[0], (0, rows.count - count))
        return rows.feed(padded)[None, :count]

    def choose(
        self, logits: mx.array, width: int, rules: mx.array, *, drawn: bool
    ) -> tuple[mx.array, mx.array]:
        """Compute `sampling.device.guess` without filters from a trace; `drawn`: with noise.

        Each number of guesses compiles its own kernels, and extra guesses cost little.
        """
        wide = next((count for count in WIDTHS if count >= width), width)
        key = wide, drawn
        if key not in self._choices:
            sampling = _DRAWN if drawn else _GREEDY

            def name(logits: mx.array, rules: mx.array) -> tuple[mx.array, mx.array]:
                return guess(logits, wide, self._ids, rules, sampling)

            self._choices[key] = mx.compile(name)
        best, found = self._choices[key](logits, rules)
        return best, found[..., :width]

    # ------------------------------------------------------------ before use

    def prepare(self, new_store: Callable[[], KVStore]) -> Steps[None]:
        """Trace the passes that are correct and faster here than the model's own."""
        for rows in TRACED_ROWS:
            self._shapes.add(Shape(rows, TRACED_SLOTS[0]))
            if not (yield from self._is_worth_it(rows, new_store)):
                self._shapes.discard(Shape(rows, TRACED_SLOTS[0]))
                continue
            for slots in TRACED_SLOTS:
                self._shapes.add(Shape(rows, slots))
                store = prefill(self._model, new_store, _TRIAL_PROMPT)
                store.widen(slots)
                logits = self.run(self._open_trial(store, rows), rows)[0]
                yield
                if slots == TRACED_SLOTS[0]:  # they are the same for any size
                    yield from self._warm(logits)

    def _warm(self, logits: mx.array) -> Steps[None]:
        """Compute choices of each kind."""
        for width, sampling in itertools.product(WIDTHS, (_GREEDY, _DRAWN, _FILTERED)):
            rules = mx.array(write_rules(range(len(logits)), sampling))
            # A kernel that is tested before its first use cannot be tested inside a trace.
            mx.eval(guess(logits, width, self._ids, rules, sampling))
            if sampling is not _FILTERED:
                mx.eval(self.choose(logits, width, rules, drawn=sampling is _DRAWN))
            yield

    def _open_trial(self, store: KVStore, rows: int) -> TracedRows:
        opened = self.open(store, _trial_span(store, rows), _TRIAL_DEPTHS, is_trunk=rows == 1)
        if opened is None:
            raise ValueError(f"nothing is traced for {rows} rows of this model")
        return opened

    def run(self, side_by_side: SideBySide, rows: int) -> list[mx.array]:
        """Return the logits of a few depths, each started before the last one has been read."""
        logits: list[mx.array] = []
        rules = mx.array(write_rules(range(side_by_side.count), _GREEDY))
        for at in range(_TRIAL_DEPTHS):
            # Not the chosen tokens, which could differ where two are equally likely.
            tokens = mx.arange(5 + at, 5 + at + rows)
            logits.append(side_by_side.feed(tokens)[:, : self._size])
            launch(guess(logits[-1], 1, self._ids, rules, _GREEDY))
        mx.eval(logits)
        return logits

    def _is_worth_it(self, rows: int, new_store: Callable[[], KVStore]) -> Steps[bool]:
        def open_plain() -> SideBySide:
            store = prefill(self._model, new_store, _TRIAL_PROMPT)
            span = _trial_span(store, rows)
            if rows == 1:
                return PlainChain(self._model, store)
            return PlainBranches(self._model, store, span)

        def open_traced() -> SideBySide:
            return self._open_trial(prefill(self._model, new_store, _TRIAL_PROMPT), rows)

        def run(open_rows: Callable[[], SideBySide]) -> Any:
            return lambda: self.run(open_rows(), rows)

        def run_again(open_rows: Callable[[], SideBySide]) -> Any:
            opened = [open_rows() for _ in range(1 + selftest.TURNS)]
            return lambda: self.run(opened.pop(), rows)

        ways = open_plain, open_traced
        timed = map(run_again, ways)
        what = f"traced depths of {rows} rows"
        return (yield from selftest.check(what, "trace", *map(run, ways), timed=timed)).faster


def _pad(count: int) -> int:
    return next((size for size in TRACED_ROWS if size >= count), 0)


def _has_window(cache: SlotCache) -> bool:
    return type(cache) is not SlotCache or cache.window is not None


def _trial_span(store: KVStore, rows: int) -> Span:
    """Return the span of `rows` branches after the last token."""
    positions = np.concatenate([np.arange(store.length), np.full(rows, store.length)])
    before = np.ones((rows, store.length), np.bool_)
    return Span(store.length, positions, np.hstack([before, np.eye(rows, dtype=np.bool_)]))
