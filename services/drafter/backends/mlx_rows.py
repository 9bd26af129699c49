"""A drafter's traced passes and choices: which pay, found at load.

See `engine.side_by_side`.
"""

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.messages import Sampling
from services.engine.batch import Shape, Span
from services.engine.side_by_side import PlainBranches, PlainChain, SideBySide, TracedRows
from services.engine.trace import prefill
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

_GREEDY, _DRAWN = Sampling(), Sampling(temperature=1.0)
_FILTERED = Sampling(temperature=1.0, top_p=0.9)
_TRIAL_PROMPT = 24
_TRIAL_DEPTHS = 4


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
        self._choices: dict[tuple[int, bool], Any] = {}

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
            shapes = [Shape(rows, slots, forks=True) for slots in TRACED_SLOTS]
            self.forward.shapes.add(shapes[0])
            if not (yield from self._is_worth_it(rows, new_store)):
                self.forward.shapes.discard(shapes[0])
                continue
            for slots in TRACED_SLOTS:
                self.forward.shapes.add(Shape(rows, slots, forks=True))
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
        span, is_trunk = _trial_span(store, rows), rows == 1
        opened = self.forward.open(store, span, _TRIAL_DEPTHS, is_trunk=is_trunk)
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


def _trial_span(store: KVStore, rows: int) -> Span:
    """Return the span of `rows` branches after the last token."""
    positions = np.concatenate([np.arange(store.length), np.full(rows, store.length)])
    before = np.ones((rows, store.length), np.bool_)
    return Span(store.length, positions, np.hstack([before, np.eye(rows, dtype=np.bool_)]))
