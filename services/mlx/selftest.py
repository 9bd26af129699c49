"""Self-tests: whether another way to compute is right, and faster.

Whatever is wrong or slow here is not used, which costs speed only; the log says so.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from services.runtime.preparation import Steps, run_all

_log = logging.getLogger(__name__)

TURNS = 8
"""Timed rounds of alternatives run in turn."""
_WORTHWHILE = 0.97
"""Share of the other time that an alternative of ours may take."""
UNTIMED = math.inf
TOLERANCES = {
    "bits": 0.0,
    "best logits": 1e-5,
    "guess": 1e-3,
    # Half precision rounds the result to steps of .001 (float16) or .008 (bfloat16).
    "product": 0.01,
    "attention": 0.01,
    # MLX rounds each step of a gate, our kernel only its end.
    "block": 0.01,
    "block in bfloat16": 0.04,
    # Logits, in which half precision adds up over the layers.
    "trace": 0.02,
    "tap": 0.02,
    "shared pass": 0.05,
    "tree": 0.05,
    "rewinding": 0.05,
    "rewinding in float32": 0.002,
    "rewinding in any case": 1e-4,
}
"""Relative difference from the usual result that is still right, by operation."""

Way = Callable[..., Any]
"""Returns an array, or several, lazy."""


class Verdict(NamedTuple):
    """The outcome of a self-test."""

    reason: str = ""
    """Why our way is wrong, if it is."""
    faster: bool = False
    """True if it is right, too: it is used."""
    distance: float = 0.0
    """Relative difference from the usual result."""
    usual_s: float = 0.0
    ours_s: float = 0.0

    @property
    def right(self) -> bool:
        """True if results are the usual ones."""
        return not self.reason


def check(
    what: str,
    operation: str,
    usual: Way,
    ours: Way,
    inputs: Iterable[Sequence[Any]] = ((),),
    *,
    share: float | None = None,
    timed: Iterable[Way] = (),
) -> Steps[Verdict]:
    """Compare our way with the usual one.

    Args:
        what: our way, for the log.
        operation: one of `TOLERANCES`.
        usual, ours: the reference, and our way.
        inputs: arguments of both; the last ones are timed.
        share: as for `is_faster`; `UNTIMED` if time does not matter.
        timed: the usual way and ours for timing, without arguments, if other than above.
    """
    furthest, arguments = 0.0, tuple[Any, ...]()
    try:
        for arguments in map(tuple, inputs):
            expected = usual(*arguments)
            # Evaluated first: kernels that are tested before their first use cannot be tested
            # inside a trace.
            mx.eval(expected)
            distance = measure_distance(expected, ours(*arguments))
            yield
            if not is_close(what, distance, operation):
                wrong = f"its result is {distance:.2g} from the usual one"
                return Verdict(wrong, distance=distance)
            furthest = max(furthest, distance)
    except Exception as error:  # noqa: BLE001
        return _refuse(what, operation, error)
    if share == UNTIMED:
        return Verdict("", faster=True, distance=furthest)
    ways = list(timed) or [partial(way, *arguments) for way in (usual, ours)]
    usual_s, ours_s = yield from time_in_turn(ways)
    return Verdict("", is_faster(what, usual_s, ours_s, share), furthest, usual_s, ours_s)


def _refuse(what: str, operation: str, error: Exception) -> Verdict:
    """Log an error: of any kind where kernels do not compile; many models cannot be traced."""
    log = _log.info if operation == "trace" else _log.warning
    log("%s: not used: %s", what, error)
    return Verdict(f"it does not run here: {error}")


def is_right(what: str, operation: str, usual: Way, ours: Way, inputs: Any = ((),)) -> bool:
    """Run `check` at once, without timing."""
    return run_all(check(what, operation, usual, ours, inputs, share=UNTIMED)).right


def measure_distance(expected: Any, result: Any) -> float:
    """Return the largest relative difference of arrays, or of lists of arrays."""
    if not isinstance(expected, mx.array):
        return float(np.max([*map(measure_distance, expected, result)]))
    expected, result = expected.astype(mx.float32), result.astype(mx.float32)
    relative: Any = (mx.linalg.norm(result - expected) / mx.linalg.norm(expected)).item()
    return float(relative)


def is_close(what: str, distance: float, operation: str = "trace") -> bool:
    """Return True if a result at this distance from the usual one is right."""
    if not distance <= TOLERANCES[operation]:
        _log.warning("%s: %.2g from the usual result: not used", what, distance)
        return False
    return True


def is_faster(what: str, usual_s: float, ours_s: float, share: float | None = None) -> bool:
    """Return True if another way to compute pays.

    Args:
        what: the computation, for the log.
        usual_s: seconds of the usual way.
        ours_s: seconds of this one.
        share: of the usual way's time that it may take; as in `pays` if not given.
    """
    used = pays(ours_s, usual_s) if share is None else ours_s < share * usual_s
    decided = "used" if used else "not used"
    _log.info("%s: %.3f ms, otherwise %.3f ms: %s", what, 1e3 * ours_s, 1e3 * usual_s, decided)
    return used


def pays(ours: float, usual: float) -> bool:
    """Return True if our time is short enough to replace the usual one."""
    return ours < _WORTHWHILE * usual


def _time(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - started


def time_in_turn(runs: Sequence[Callable[[], Any]]) -> Steps[list[float]]:
    """Return the seconds of the fastest pass of each, run in turn; the first ones do not count."""
    times = []
    for _ in range(TURNS + 1):
        times.append([_time(run) for run in runs])
        yield
    return [min(own) for own in zip(*times[1:], strict=True)]
