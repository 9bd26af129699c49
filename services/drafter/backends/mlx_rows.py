"""A drafter's traced passes and choices: which pay, found at load.

A depth of a small drafter costs the host, which builds the graph, more than the GPU, which computes
it. From a trace (`engine.trace`) the slots and masks of the next pass are outputs next to the
logits, so that nothing has to be sent to the device between two passes.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.messages import Sampling
from services.engine.batch import Batch, Shape, Span, advance_branches, advance_trunk
from services.engine.runner import ModelRunner
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
        self._traced = ModelRunner(model, self.forward)
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
                logits = self.run(self._traced, store, rows)[0]
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

    def run(self, runner: ModelRunner, store: KVStore, rows: int) -> list[mx.array]:
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

    def _is_worth_it(self, rows: int, new_store: Callable[[], KVStore]) -> Steps[bool]:
        def run(runner: ModelRunner) -> list[mx.array]:
            return self.run(runner, prefill(self._model, new_store, _TRIAL_PROMPT), rows)

        def run_again(runner: ModelRunner) -> Callable[[], list[mx.array]]:
            stores = [
                prefill(self._model, new_store, _TRIAL_PROMPT) for _ in range(1 + selftest.TURNS)
            ]
            return lambda: self.run(runner, stores.pop(), rows)

        runners = ModelRunner(self._model), self._traced
        usual, ours = (partial(run, runner) for runner in runners)
        what, timed = f"traced depths of {rows} rows", map(run_again, runners)
        return (yield from selftest.check(what, "trace", usual, ours, timed=timed)).faster


def _begin_trial(store: KVStore, rows: int) -> Batch:
    """Return the first pass over `rows` branches after the last token; one row is the trunk."""
    if rows == 1:
        return advance_trunk(store, 1, _TRIAL_DEPTHS)
    positions = np.concatenate([np.arange(store.length), np.full(rows, store.length)])
    before = np.ones((rows, store.length), np.bool_)
    visible = np.hstack([before, np.eye(rows, dtype=np.bool_)])
    return advance_branches(store, Span(store.length, positions, visible), _TRIAL_DEPTHS)
