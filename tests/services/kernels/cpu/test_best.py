"""The best of rows of logits, found by our kernel: what numpy finds."""

import numpy as np
import numpy.typing as npt
import pytest

from protocol.errors import NotNumbers
from services.kernels.cpu.best import find_best
from services.sampling import candidates
from services.sampling.candidates import best_of
from tests.support.reference import for_the_cpu

pytestmark = for_the_cpu
HEADS = (1, 2, 7, 8, 9, 64, 1000, 16001)


def logits_of(head: int, *, rows: int = 5) -> npt.NDArray[np.float32]:
    """With equal ones, some far below the others and some that are forbidden."""
    random = np.random.default_rng(head)
    logits = random.normal(0.0, 4.0, (rows, head)).round(2).astype(np.float32)
    logits[1] -= 300.0 * (random.random(head) < 0.3)
    logits[2, random.random(head) < 0.5] = -np.inf
    logits[2, -1] = 3.0
    return logits


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("width", [1, 3, 64])
def test_what_numpy_finds(head: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same candidates but for the order of equal ones, and the same sums."""
    logits, ids = logits_of(head), np.arange(head) * 3 + 5
    found = best_of(logits, width, ids)
    monkeypatch.setattr(candidates, "find_best", lambda *_: None)
    expected = best_of(logits, width, ids)
    assert np.array_equal(found.logits, expected.logits)
    assert np.array_equal(np.take_along_axis(logits, (found.ids - 5) // 3, axis=1), found.logits)
    assert all(len(set(row)) == len(row) for row in found.ids.tolist())
    assert found.totals == pytest.approx(expected.totals, abs=2e-5)


def test_of_equal_ones_the_first() -> None:
    """As `argmax` has it."""
    found = find_best(np.zeros((1, 40), np.float32), 3)
    assert found is not None
    assert found.columns.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("at", [0, 8, 20])
def test_what_is_no_number_is_said(at: int) -> None:
    """Wherever it is in the row."""
    logits = logits_of(21)
    logits[4, at] = np.nan
    with pytest.raises(NotNumbers):
        best_of(logits, 3, None)


def test_rows_apart() -> None:
    """A part of the columns, as of a padded head; what is not contiguous is left to numpy."""
    logits = logits_of(64)
    part = find_best(logits[:, :50], 2)
    whole = find_best(np.ascontiguousarray(logits[:, :50]), 2)
    assert part is not None
    assert whole is not None
    assert np.array_equal(part.columns, whole.columns)
    assert find_best(logits[:, ::2], 2) is None
    assert find_best(logits.astype(np.float64), 2) is None
