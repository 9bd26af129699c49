"""Self-test of a trace of a model's forward: is it right, and faster than the forward?"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from services.kv.cache import KVStore

_log = logging.getLogger(__name__)

_TOLERANCE = 0.02
"""Relative difference of the logits; half precision rounds coarsely."""
_TURNS = 8
"""Timed rounds of ways that take turns."""
_WORTHWHILE = 0.97
"""Share of the other way's time that a way of ours may take."""

Pass = Callable[[], mx.array]
"""Begins a pass over the same tokens each time; its logits, lazy."""


def prefill(model: Any, new_store: Callable[[], KVStore], length: int) -> KVStore:
    """A sequence of so many tokens, for trials."""
    store = new_store()
    store.chain(length)
    mx.eval(model(mx.arange(1, 1 + length)[None], cache=store.caches))
    return store


def is_worth_it(what: str, own: Pass, replayed: Pass) -> bool:
    """Return whether replays have the model's own logits, in less time.

    Args:
        what: is computed, for the log.
        own: the model's own forward.
        replayed: by a trace, which its first call makes.
    """
    try:
        distances = [_compare(own, replayed) for _ in range(2)]
    # Whatever a model does that cannot be traced: control flow on values, caches of its own.
    except Exception as error:  # noqa: BLE001
        _log.info("the forward of this model is not traced for %s: %s", what, error)
        return False
    traced = f"traced {what}"
    return is_close(traced, max(distances)) and is_faster(traced, *time_in_turn([own, replayed]))


def _compare(own: Pass, replayed: Pass) -> float:
    expected = own()
    # Evaluated first: kernels that are tried out before their first use cannot be so in the
    # middle of a trace.
    mx.eval(expected)
    return measure_distance(expected, replayed())


def measure_distance(expected: mx.array, found: mx.array) -> float:
    """Relative difference of what was found; arrays of one shape."""
    expected, found = expected.astype(mx.float32), found.astype(mx.float32)
    relative: Any = (mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item()
    return float(relative)


def is_close(what: str, relative: float) -> bool:
    """Return whether logits that are so far from the model's own will do."""
    if not relative < _TOLERANCE:
        _log.warning("%s: logits are %.2g from the model's own: not used", what, relative)
        return False
    return True


def is_faster(what: str, own_s: float, other_s: float, share: float | None = None) -> bool:
    """Return whether another way to compute pays.

    Args:
        what: is computed so, for the log.
        own_s: seconds of the usual way.
        other_s: of this one.
        share: of the usual way's time that it may take; as `pays` if not given.
    """
    used = pays(other_s, own_s) if share is None else other_s < share * own_s
    decided = "used" if used else "not used"
    _log.info("%s: %.2f ms, otherwise %.2f ms: %s", what, 1e3 * other_s, 1e3 * own_s, decided)
    return used


def pays(ours: float, theirs: float) -> bool:
    """Return whether what takes one time is worth having in the place of what takes the other."""
    return ours < _WORTHWHILE * theirs


def _time(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - started


def time_in_turn(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds of the fastest pass of each, which take turns; the first ones do not count."""
    times = [[_time(run) for run in runs] for _ in range(_TURNS + 1)]
    return [min(own) for own in zip(*times[1:], strict=True)]
