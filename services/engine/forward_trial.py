"""Choose by timing at load which passes of a model are replayed on this device."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from protocol.decoding.token_tree import read_tree
from services.engine.batch import Shape
from services.engine.trace import prefill
from services.engine.traced_forward import (
    MOST_ROWS,
    TRACED_SLOTS,
    TREE_ROWS,
    Singles,
    TracedForward,
)
from services.kv.cache import KVStore
from services.mlx.launching import launch, launch_in_pieces
from services.mlx.selftest import Verdict, check, is_faster, pays, time_in_turn
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

_TRIAL_PROMPT = 24
_LONGER_PROMPT = 200
"""Prompt length at which both a token's own kernels, for the exact length, and a trace's, over
whole buffers, take as long as in most answers.
"""
_TRIAL_ROWS = 4
_TRIAL_AHEAD = 24
"""Tokens that begin ahead: enough that the start of the first one does not count."""
_SHARE_AHEAD = 1.05
"""Share of the own forward's time: where the GPU takes equally long, a replay still frees host
time for token selection and other work in between.
"""
_TRIAL_TREE = read_tree([5, 9, 3, 11, 4, 7], [0, 1, 0, 1, 3])

Forward = Callable[[mx.array, KVStore], mx.array]
Place = Callable[[KVStore], None]
"""Sets the span of the next pass."""


def place_chain(store: KVStore) -> None:
    """Begin a pass over the test's chain."""
    store.chain(_TRIAL_ROWS)


def place_single(store: KVStore) -> None:
    """Begin a pass over the test's single token."""
    store.chain(1)


def place_tree(store: KVStore) -> None:
    """Begin a pass over the test's tree."""
    store.append_tree(_TRIAL_TREE)


def trace_if_faster(
    model: Any, new_store: Callable[[], KVStore], *, takes_trees: bool = False
) -> Steps[TracedForward | None]:
    """Return a traced forward for this model, or None where it is wrong or not faster here.

    Args:
        model: as for `TracedForward`.
        new_store: creates an empty store for a sequence of this model.
        takes_trees: True if trees are verified, and so need their own traces.
    """
    traced = TracedForward(model)
    if not (yield from _compare(model, traced, new_store, place_chain, "chains")).faster:
        return None
    alone = yield from _compare(model, traced, new_store, place_single, "single tokens")
    # These may be twice as fast where those that are awaited are not.
    ahead = alone.right and (yield from _is_worth_it_ahead(model, traced, new_store))
    traced.singles = singles = Singles(awaited=alone.faster, ahead=ahead)
    for slots in TRACED_SLOTS:
        for rows in range(1 if any(singles) else 2, MOST_ROWS + 1):
            traced.prepare(Shape(rows, slots), new_store)
            yield
    if takes_trees and (yield from _compare(model, traced, new_store, place_tree, "trees")).faster:
        traced.tree_rows = drop_slow((yield from _time_trees(model, traced, new_store)))
        for slots in TRACED_SLOTS:
            for rows in traced.tree_rows:
                traced.prepare(Shape(rows, slots, forks=True), new_store)
                yield
    return traced


def drop_slow(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Return the sizes, with the seconds of a pass, for which no larger one is faster."""
    return tuple(
        rows
        for rows, own_s in seconds.items()
        if not any(pays(larger_s, own_s) for more, larger_s in seconds.items() if more > rows)
    )


def _time_trees(
    model: Any, traced: TracedForward, new_store: Callable[[], KVStore]
) -> Steps[dict[int, float]]:
    """Return the seconds of replays by their rows."""

    def place(rows: int, store: KVStore) -> None:
        store.append_tree(read_tree(list(range(rows)), [0] * (rows - 1)))

    def run(tokens: mx.array, store: KVStore) -> mx.array:
        logits = traced(tokens, store)
        launch_in_pieces(store.milestones)  # as for such passes in an answer
        return logits

    store = prefill(model, new_store, _TRIAL_PROMPT)
    ways = [partial(_try_pass, run, store, partial(place, rows)) for rows in TREE_ROWS]
    found = dict(zip(TREE_ROWS, (yield from time_in_turn(ways)), strict=True))
    times = ", ".join(f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in found.items())
    _log.info("traced trees by their rows, in ms: %s", times)
    return found


def _is_worth_it_ahead(
    model: Any, traced: TracedForward, new_store: Callable[[], KVStore]
) -> Steps[bool]:
    """Return True if replays of single tokens that begin ahead of the last one are faster."""

    def begin(forward: Forward, store: KVStore) -> mx.array:
        token = mx.array([5])
        for _ in range(_TRIAL_AHEAD):
            place_single(store)
            token = mx.argmax(forward(token[None], store)[0, -1:], axis=-1)
            launch(token)
        store.trim(_LONGER_PROMPT)
        return token

    ways = [
        partial(begin, forward, prefill(model, new_store, _LONGER_PROMPT))
        for forward in (partial(_call, model), partial(traced, ahead=True))
    ]
    own_s, replayed_s = yield from time_in_turn(ways)
    return is_faster("traced single tokens that begin ahead", own_s, replayed_s, _SHARE_AHEAD)


def _call(model: Any, tokens: mx.array, store: KVStore) -> mx.array:
    logits: mx.array = model(tokens, cache=store.caches)
    return logits


def _compare(
    model: Any, traced: TracedForward, new_store: Callable[[], KVStore], place: Place, what: str
) -> Steps[Verdict]:
    """Compare replays of the pass from `place` with the model's own forward."""
    own, other = (prefill(model, new_store, _TRIAL_PROMPT) for _ in range(2))
    place(other)
    if not traced.can_trace(other):
        return Verdict("it goes into no plain slots")
    other.trim(_TRIAL_PROMPT)
    usual = partial(_try_pass, partial(_call, model), own, place)
    ours = partial(_try_pass, traced, other, place)
    # Twice, since the first replay makes the trace.
    return (yield from check(f"traced {what}", "trace", usual, ours, [(), ()]))


def _try_pass(forward: Forward, store: KVStore, place: Place) -> mx.array:
    """Return the logits of the pass from `place`, each time one token further in the text."""
    length = store.length
    place(store)
    first = length % 5 + 5
    logits = forward(mx.arange(first, first + store.span.count)[None], store)
    store.trim(length + 1)
    return logits
