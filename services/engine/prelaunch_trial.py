"""Self-test of passes that are launched before their tokens are known."""

import itertools
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from protocol.decoding.token_tree import read_tree
from services.engine.batch import Batch, BatchPart
from services.engine.pass_handle import ReservedPass
from services.engine.runner import ModelRunner
from services.engine.trace import prefill
from services.engine.traced_forward import TRACED_SLOTS, TracedForward
from services.kernels.cuda.doorbell import Doorbell, open_doorbell
from services.kv.cache import KVStore
from services.mlx.selftest import is_close, is_faster, measure_distance
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

_PROMPT = 200
_ROWS = 4
_CHAIN = read_tree(list(range(5, 5 + _ROWS)), [])
_TURNS = 24
_SETTLED = 12
"""Turns after which all memory has been allocated and all graphs have been built."""
_ARRIVAL_S = 0.001
"""Time until the next tokens arrive."""
_WHAT = "passes launched before their tokens are known"


def find_doorbell(runner: ModelRunner, new_store: Callable[[], KVStore]) -> Steps[Doorbell | None]:
    """Return a doorbell if passes that wait for one are correct and faster here.

    Args:
        runner: runs the model's passes, trees among them from traces.
        new_store: creates an empty store for a sequence of this model.
    """
    bell = open_doorbell() if runner.traced is not None else None
    if bell is None or runner.traced is None:
        return None
    trial = _Trial(runner, runner.traced, new_store, bell)
    try:
        used = yield from trial.run()
    # Faults of a device or a driver must show here, and not in an answer.
    except Exception as error:  # noqa: BLE001
        _log.warning("%s: %s: not used", _WHAT, error)
        return None
    return bell if used else None


class _Trial:
    """Consecutive chains, requested normally or prelaunched."""

    def __init__(
        self,
        runner: ModelRunner,
        traced: TracedForward,
        new_store: Callable[[], KVStore],
        bell: Doorbell,
    ) -> None:
        self._runner, self._traced, self._bell = runner, traced, bell
        self._stores = [prefill(runner.model, new_store, _PROMPT) for _ in range(2)]
        self._missed = 0

    def run(self) -> Steps[bool]:
        """Return True if prelaunched passes are to be used."""
        usual_s = [self._ask()[0] for _ in range(_TURNS)]
        _, expected = self._ask()
        yield
        rung_s, logits = self._ring_in_turn()
        if self._missed:
            _log.info("%s: %d of %d were rung too late", _WHAT, self._missed, _TURNS - _SETTLED)
            return False
        if not is_close(_WHAT, measure_distance(expected, logits)):
            return False
        ways = [statistics.median(times[_SETTLED:]) for times in (usual_s, rung_s)]
        if not is_faster(_WHAT, *ways):
            return False
        yield from self._make_graphs()
        return True

    def _make_graphs(self) -> Steps[None]:
        """Run a pass of each shape that is traced at load, twice: the first one grows its buffers.

        CUDA builds no graph while another pass waits on the device.
        """
        store = self._stores[1]
        for slots, rows in itertools.product(TRACED_SLOTS, self._traced.tree_rows):
            store.trim(_PROMPT)
            store.widen(slots)
            store.chain(_ROWS)
            for _ in range(2):
                if (pass_ := self._runner.reserve(rows, store, self._bell)) is None:
                    break
                self._bell.ring(pass_.ticket, _CHAIN, store.span.start)
                self._bell.launch(pass_.ticket.rung, pass_.logits)
                self._bell.report(mx.argmax(pass_.logits, axis=-1).astype(mx.int32))()
            yield

    def _ask(self) -> tuple[float, mx.array]:
        """Return the seconds of a pass, and its logits; the store is restored."""
        store = self._stores[0]
        part = BatchPart(store, _ROWS, partial(store.chain, _ROWS), _CHAIN.tokens)
        began = time.perf_counter()
        logits = self._runner.run(Batch([part]))[0].logits
        mx.argmax(logits, axis=-1).tolist()
        took_s = time.perf_counter() - began
        store.trim(_PROMPT)
        return took_s, logits

    def _ring_in_turn(self) -> tuple[list[float], mx.array]:
        """Return the seconds from ringing to the tokens, and the last logits."""
        store, times = self._stores[1], list[float]()
        store.chain(_ROWS)
        now, logits = self._launch(), mx.array(0)
        for turn in range(_TURNS):
            time.sleep(_ARRIVAL_S)
            store.trim(_PROMPT)
            store.chain(_ROWS)
            began = time.perf_counter()
            self._bell.ring(now.ticket, _CHAIN, store.span.start)
            logits = now.logits[:_ROWS]
            best = self._bell.report(mx.argmax(logits, axis=-1).astype(mx.int32))
            after = self._launch()
            best()
            times.append(time.perf_counter() - began)
            self._missed += turn >= _SETTLED and not now.ticket.rung.item()
            now = after
        self._bell.call_off(now.ticket)
        return times, logits

    def _launch(self) -> ReservedPass:
        rows = self._traced.pad_rows(2 * _ROWS)
        after = self._runner.reserve(rows, self._stores[1], self._bell)
        if after is None:
            raise ValueError("there is no trace of a tree")
        self._bell.launch(after.ticket.rung, after.logits)
        return after
