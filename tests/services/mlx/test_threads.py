"""Helper threads of the CPU kernels: whoever computes a part, and whenever cores are lent."""

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import pytest

from services.kernels.cpu import library
from services.kernels.cpu.packing import MlxWeights, pack
from services.kernels.cpu.program import find_program, multiply
from tests.support.reference import for_the_cpu
from tests.support.stack import DEADLINE_S

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="macOS has no kernels for the CPU"),
    for_the_cpu,
]

PARTS = 50


@pytest.fixture
def lent() -> Iterator[ctypes.c_int]:
    """Whether the only helper may help; not yet."""
    word = ctypes.c_int(0)
    assert library.use_spare_cores([0], word) == 1
    yield word
    library.use_spare_cores(())


def share(compute: Callable[[int], None], parts: int = PARTS) -> list[int]:
    """Compute these parts; returns the threads that did, by part."""
    kernels = library.cpu_kernels()
    assert kernels is not None
    by: list[list[int]] = [[] for _ in range(parts)]
    raised: list[Exception] = []

    def part(context: object, number: int) -> None:
        del context
        by[number].append(threading.get_native_id())
        try:
            if not raised:
                compute(number)
        except Exception as error:  # noqa: BLE001  # C code would go on
            raised.append(error)

    kernels.share_parts(ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(part), None, parts)
    if raised:
        raise raised[0]
    return [thread for [thread] in by]


class Meeting:
    """The one who asks and its helper wait for each other, once each."""

    def __init__(self) -> None:
        self._barrier, self._here = threading.Barrier(2), set[int]()

    def join(self) -> None:
        """Raises BrokenBarrierError if the other one does not come."""
        if (own := threading.get_native_id()) not in self._here:
            self._here.add(own)
            self._barrier.wait(DEADLINE_S)


def test_a_core_that_is_not_lent_is_left_alone(lent: ctypes.c_int) -> None:
    """Nobody but the one who asks computes anything."""
    del lent
    for _ in range(20):
        assert set(share(lambda _: None)) == {threading.get_native_id()}


@pytest.mark.parametrize("at", [-1, 0, PARTS // 2], ids=["before", "first part", "half way"])
def test_a_core_that_is_lent_helps_at_once(lent: ctypes.c_int, at: int) -> None:
    """Also with a product that is in work: no further one has to begin."""
    meeting = Meeting()
    lent.value = int(at < 0)

    def compute(number: int) -> None:
        if number == at:
            lent.value = 1
        elif number > at:
            meeting.join()

    by = share(compute)
    assert len(set(by)) == 2
    assert set(by[: max(0, at)]) <= {threading.get_native_id()}


def test_a_core_is_given_back_between_two_parts(lent: ctypes.c_int) -> None:
    """A helper ends what it has begun, and begins nothing more until its core is lent again."""
    own, came = threading.get_native_id(), threading.Event()
    for _ in range(3):
        lent.value = 1
        came.clear()

        def compute(number: int) -> None:
            del number
            if threading.get_native_id() != own:
                lent.value = 0
                came.set()
            else:
                assert came.wait(DEADLINE_S), "the helper does not come"

        by = share(compute)
        assert sum(thread != own for thread in by) == 1


def test_products_are_the_same_bits_while_a_core_comes_and_goes(lent: ctypes.c_int) -> None:
    """Of few rows and of many."""
    program = find_program()
    assert program is not None
    random = np.random.default_rng(5)
    weight = pack(MlxWeights(mx.array(random.normal(size=(3000, 200)).astype(np.float32))))
    rows = [random.normal(size=(count, 200)).astype(np.float32) for count in (1, 4, 40)]
    expected = [multiply(program, weight, each, rounds=False) for each in rows]
    stop = threading.Event()

    def change() -> None:
        for turn in itertools.count():
            lent.value = turn % 2
            if stop.wait(5e-5):
                return

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(60):
            for each, product in zip(rows, expected, strict=True):
                found = multiply(program, weight, each, rounds=False)
                np.testing.assert_array_equal(found, product)
    finally:
        stop.set()
        changing.join()


def test_helpers_of_this_process_are_not_asked_whether_a_core_is_lent() -> None:
    """Cores that are lent for good need no flag, whatever an earlier one says."""
    meeting, word = Meeting(), ctypes.c_int(0)
    assert library.use_spare_cores([0], word) == 1
    assert library.use_spare_cores([0]) == 1
    assert len(set(share(lambda _: meeting.join()))) == 2
    library.use_spare_cores(())
