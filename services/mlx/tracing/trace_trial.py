"""Self-test of a trace of a model's forward: is it correct, and faster than the forward?"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from services.kv.cache import KVStore
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

_TOLERANCE = 0.02
"""Relative difference of the logits; half precision rounds coarsely."""
_TURNS = 8
"""Timed rounds of alternatives run in turn."""
_WORTHWHILE = 0.97
"""Share of the other time that an alternative of ours may take."""

Pass = Callable[[], mx.array]
"""Starts a pass over the same tokens each time; returns its logits, lazy."""


def prefill(model: Any, new_store: Callable[[], KVStore], length: int) -> KVStore:
    """Return a sequence of `length` tokens, for tests."""
    store = new_store()
    store.chain(length)
    mx.eval(model(mx.arange(1, 1 + length)[None], cache=store.caches))
    return store


def is_worth_it(what: str, own: Pass, replayed: Pass) -> Steps[bool]:
    """Return True if replays have the model's own logits, in less time.

    Args:
        what: the computation, for the log.
        own: the model's own forward.
        replayed: by a trace, which its first call makes.
    """
    try:
        first = _compare(own, replayed)
        yield
        distances = [first, _compare(own, replayed)]
    # Models can fail to be traced in any way: control flow on values, their own caches.
    except Exception as error:  # noqa: BLE001
        _log.info("the forward of this model is not traced for %s: %s", what, error)
        return False
    traced = f"traced {what}"
    if not is_close(traced, max(distances)):
        return False
    return is_faster(traced, *(yield from time_in_turn([own, replayed])))


def _compare(own: Pass, replayed: Pass) -> float:
    expected = own()
    # Evaluated first: kernels that are tested before their first use cannot be tested inside a
    # trace.
    mx.eval(expected)
    return measure_distance(expected, replayed())


def measure_distance(expected: mx.array, found: mx.array) -> float:
    """Return the relative difference of arrays of one shape."""
    expected, found = expected.astype(mx.float32), found.astype(mx.float32)
    relative: Any = (mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item()
    return float(relative)


def is_close(what: str, relative: float) -> bool:
    """Return True if logits at this distance from the model's own are acceptable."""
    if not relative < _TOLERANCE:
        _log.warning("%s: logits are %.2g from the model's own: not used", what, relative)
        return False
    return True


def is_faster(what: str, own_s: float, other_s: float, share: float | None = None) -> bool:
    """Return True if another way to compute pays.

    Args:
        what: the computation, for the log.
        own_s: seconds of the usual way.
        other_s: seconds of this one.
        share: of the usual way's time that it may take; as in `pays` if not given.
    """
    used = pays(other_s, own_s) if share is None else other_s < share * own_s
    decided = "used" if used else "not used"
    _log.info("%s: %.2f ms, otherwise %.2f ms: %s", what, 1e3 * other_s, 1e3 * own_s, decided)
    return used


def pays(ours: float, theirs: float) -> bool:
    """Return True if our time is short enough to replace theirs."""
    return ours < _WORTHWHILE * theirs


def _time(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - started


def time_in_turn(runs: Sequence[Callable[[], Any]]) -> Steps[list[float]]:
    """Return the seconds of the fastest pass of each, run in turn; the first ones do not count."""
    times = []
    for _ in range(_TURNS + 1):
        times.append([_time(run) for run in runs])
        yield
    return [min(own) for own in zip(*times[1:], strict=True)]
