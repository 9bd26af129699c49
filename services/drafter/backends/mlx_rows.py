"""A drafter's traced passes and choices: which pay, found at load.

A depth of a small drafter costs the host, which builds the graph, more than the GPU, which computes
it. From a trace (`engine.trace`) the slots and masks of the next pass are outputs next to the
logits, so that nothing has to be sent to the device between two passes. The first depths of
branches are one trace and one launch.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from protocol.messages import Sampling
from services.engine.batch import Batch, Shape, Span, advance_branches, advance_trunk
from services.engine.runner import ModelRunner
from services.engine.trace import prefill, put_back
from services.engine.traced_forward import TRACED_SLOTS, TracedForward
from services.kernels.cuda.sampling.guess import WIDTHS
from services.kernels.cuda.sampling.rules import write_rules
from services.kv.cache import KVStore
from services.mlx import selftest
from services.mlx.launching import launch
from services.runtime.preparation import Steps
from services.sampling.device import guess

TRACED_ROWS = (1, 8, 32)
"""Sizes that rows are padded to; larger ones are not traced."""

_TOGETHER = (4, 3, 2)
"""Numbers of depths that are launched together."""

_GREEDY, _DRAWN = Sampling(), Sampling(temperature=1.0)
_FILTERED = Sampling(temperature=1.0, top_p=0.9)
_TRIAL_PROMPT = 24
_TRIAL_DEPTHS = 4


class Launched(NamedTuple):
    """A running pass, and the tokens chosen after it."""

    tokens: mx.array
    """[rows] int32, the argmax after each row."""
    candidates: mx.array
    """As from `sampling.device.guess`."""
    logits: mx.array
    """[rows, head]."""
    following: Batch | None
    """As for `PassHandle`."""


class TracedPasses:
    """Passes over a drafter's rows, and the choices after them, traced at load.

    Args:
        model: called on tokens [1, n] and caches.
        head_size: columns of its logits that have a token.
        ids: [head] int32, their token ids.
    """

    def __init__(self, model: Any, head_size: int, ids: mx.array) -> None:
        self._model, self._size, self._ids = model, head_size, ids
        self.forward = TracedForward(model, columns=head_size, padded=TRACED_ROWS)
        """Its passes."""
        self._traced = ModelRunner(model, self.forward)
        self._choices: dict[tuple[int, bool], Any] = {}
        self._growths: dict[tuple[int, int, bool], Any] = {}
        self._together: set[int] = set()
        """Rows of which several depths are launched together."""

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

    def count_together(self, rows: int, depth: int) -> int:
        """Return how many depths of so many padded rows are launched together; 0 for none."""
        if rows not in self._together:
            return 0
        return next((count for count in _TOGETHER if count <= depth), 0)

    def grow(
        self, runner: ModelRunner, batch: Batch, rules: mx.array, width: int, *, drawn: bool
    ) -> list[Launched]:
        """Launch several depths of branches, from this pass on; the tokens are chosen in between.

        Args:
            runner: of these passes.
            batch: the first one.
            rules: [depths, rows, WORDS] of the tokens after each.
            width: as for `choose`.
            drawn: as for `choose`.
        """
        store: Any = batch.parts[0].state
        arrays, stride = runner.lay_out(batch)
        self.forward.own(store)
        wide = next((count for count in WIDTHS if count >= width), width)
        key = len(rules), wide, drawn
        if key not in self._growths:
            self._growths[key] = self._record_growth(wide, drawn=drawn)
        found, place, *buffers = self._growths[key](
            arrays.arrays,
            stride,
            rules,
            [layer.keys for layer in store.caches],
            [layer.values for layer in store.caches],
        )
        if written := put_back(store.caches, *buffers):
            store.written = written
        launch(found)
        following = batch.go_on(place, stride)
        following = replace(following, depth=batch.depth - len(rules))
        return [
            Launched(tokens, candidates[..., :width], logits, following)
            for logits, tokens, candidates in found
        ]

    def _record_growth(self, width: int, *, drawn: bool) -> Any:
        """Return what `grow` replays."""
        sampling, forward = _DRAWN if drawn else _GREEDY, self.forward.trace.forward

        def compute(
            arrays: list[mx.array],
            stride: mx.array,
            rules: mx.array,
            keys: list[mx.array],
            values: list[mx.array],
        ) -> Any:
            found, buffers, following = list[Any](), (keys, values), list[mx.array]()
            for own in rules:
                logits, _, following, *after = forward(arrays, [stride], *buffers)
                if after[1]:  # not written in place
                    buffers = after[0], after[1]
                rows = logits[0, :, : self._size]
                tokens, candidates = guess(rows, width, self._ids, own, sampling)
                found.append((rows, tokens, candidates))
                arrays = [tokens[None], *following]
            return found, following, *after

        return mx.compile(compute)

    # ------------------------------------------------------------ before use

    def prepare(self, new_store: Callable[[], KVStore]) -> Steps[None]:
        """Trace the passes that are correct and faster here than the model's own."""
        for rows in TRACED_ROWS:
            shapes = [Shape(rows, slots, forks=True) for slots in TRACED_SLOTS]
            self.forward.shapes.add(shapes[0])
            runners = ModelRunner(self._model), self._traced
            ways = [partial(self.run, runner, rows) for runner in runners]
            if not (yield from self._compare(f"traced depths of {rows} rows", new_store, ways)):
                self.forward.shapes.discard(shapes[0])
                continue
            for slots in TRACED_SLOTS:
                self.forward.shapes.add(Shape(rows, slots, forks=True))
                store = prefill(self._model, new_store, _TRIAL_PROMPT)
                store.widen(slots)
                logits = self.run(self._traced, rows, store)[0]
                yield
                if slots == TRACED_SLOTS[0]:  # they are the same for any size
                    yield from self._warm(logits)
            if rows > 1:
                yield from self._try_together(rows, new_store)

    def _warm(self, logits: mx.array) -> Steps[None]:
        """Compute choices of each kind."""
        for width, sampling in itertools.product(WIDTHS, (_GREEDY, _DRAWN, _FILTERED)):
            rules = mx.array(write_rules(range(len(logits)), sampling))
            # A kernel that is tested before its first use cannot be tested inside a trace.
            mx.eval(guess(logits, width, self._ids, rules, sampling))
            if sampling is not _FILTERED:
                mx.eval(self.choose(logits, width, rules, drawn=sampling is _DRAWN))
            yield

    def _try_together(self, rows: int, new_store: Callable[[], KVStore]) -> Steps[None]:
        """Launch depths together if that pays, once in all sizes of buffers."""
        what = f"{_TOGETHER[0]} depths of {rows} rows in one launch"
        ways = [partial(self._run_apart, rows), partial(self._run_together, rows)]
        if not (yield from self._compare(what, new_store, ways)):
            return
        self._together.add(rows)
        for slots, count, drawn in itertools.product(TRACED_SLOTS, _TOGETHER, (False, True)):
            store = prefill(self._model, new_store, _TRIAL_PROMPT)
            store.widen(slots)
            mx.eval(self._run_together(rows, store, count=count, drawn=drawn))
            yield

    def run(self, runner: ModelRunner, rows: int, store: KVStore) -> list[mx.array]:
        """Return the logits of a few depths, each started before the last one has been read."""
        logits: list[mx.array] = []
        batch = _begin_trial(store, rows)
        for at in range(_TRIAL_DEPTHS):
            # Not the chosen tokens, which could differ where two are equally likely.
            [handle] = runner.run(batch.over(mx.arange(5 + at, 5 + at + rows)))
            if handle.following is None or (runner.traced and not handle.following.place):
                raise ValueError(f"nothing is traced for {rows} rows of this model")
            logits.append(handle.logits[:, : self._size])
            rules = mx.array(write_rules(range(rows), _GREEDY))
            launch(guess(logits[-1], 1, self._ids, rules, _GREEDY))
            batch = handle.following
        mx.eval(logits)
        return logits

    def _run_apart(self, rows: int, store: KVStore) -> list[mx.array]:
        """Return the logits of a few depths with chosen tokens, each launched by itself."""
        rules, logits = self._find_rules(rows, drawn=False), list[mx.array]()
        batch: Batch | None = _begin_trial(store, rows).over(mx.arange(5, 5 + rows))
        while batch is not None and len(logits) < _TOGETHER[0]:
            [handle] = self._traced.run(batch)
            logits.append(handle.logits[:, : self._size])
            tokens, candidates = self.choose(logits[-1], 1, rules[0], drawn=False)
            launch(tokens, candidates)
            batch = handle.following and handle.following.over(tokens)
        return logits

    def _run_together(
        self, rows: int, store: KVStore, *, count: int = _TOGETHER[0], drawn: bool = False
    ) -> list[mx.array]:
        """Return the same of depths that are launched together."""
        batch = _begin_trial(store, rows).over(mx.arange(5, 5 + rows))
        rules = self._find_rules(rows, drawn=drawn)[:count]
        return [one.logits for one in self.grow(self._traced, batch, rules, 1, drawn=drawn)]

    def _find_rules(self, rows: int, *, drawn: bool) -> mx.array:
        places = np.ones((_TOGETHER[0], rows), np.int64)
        return mx.array(write_rules(places, _DRAWN if drawn else _GREEDY))

    def _compare(
        self,
        what: str,
        new_store: Callable[[], KVStore],
        ways: Sequence[Callable[[KVStore], list[mx.array]]],
    ) -> Steps[bool]:
        """Return True if the second way is correct and faster."""
        fresh = partial(prefill, self._model, new_store, _TRIAL_PROMPT)

        def run(way: Callable[[KVStore], list[mx.array]]) -> list[mx.array]:
            return way(fresh())

        def run_again(way: Callable[[KVStore], list[mx.array]]) -> Callable[[], list[mx.array]]:
            stores = [fresh() for _ in range(1 + selftest.TURNS)]
            return lambda: way(stores.pop())

        usual, ours = (partial(run, way) for way in ways)
        timed = map(run_again, ways)
        return (yield from selftest.check(what, "trace", usual, ours, timed=timed)).faster


def _begin_trial(store: KVStore, rows: int) -> Batch:
    """Return the first pass over `rows` branches after the last token; one row is the trunk."""
    if rows == 1:
        return advance_trunk(store, 1, _TRIAL_DEPTHS)
    positions = np.concatenate([np.arange(store.length), np.full(rows, store.length)])
    before = np.ones((rows, store.length), np.bool_)
    visible = np.hstack([before, np.eye(rows, dtype=np.bool_)])
    return advance_branches(store, Span(store.length, positions, visible), _TRIAL_DEPTHS)
