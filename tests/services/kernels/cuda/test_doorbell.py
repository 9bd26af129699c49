"""What a pass that waits reads when it is rung for."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.token_tree import read_tree
from services.kernels.cuda import doorbell
from services.kernels.cuda.doorbell import Doorbell, Ticket, write_bits


def test_both_sides_mean_the_same_words() -> None:
    text = Path(doorbell.__file__).with_name("doorbell.cuh").read_text("utf-8")
    words = dict(re.findall(r"([A-Z]+) = (\d+)", text))
    for name in ("RUNS", "START", "TOKENS", "POSITIONS", "SEEN"):
        assert int(words[name]) == getattr(doorbell, f"_{name}")
    assert int(words["TICKET"]) == 0


def test_a_tree_is_written_down_with_its_ticket() -> None:
    """Another pass's box is left alone, and nothing of what was there before stays."""
    boxes = np.full((4, 128), 99, np.int32)
    tree = read_tree([5, 9, 3, 7], [0, 0, 2])
    Doorbell(boxes).ring(Ticket(6, 8, mx.zeros(1)), tree, 200)
    box = boxes[2]
    assert box[:3].tolist() == [6, 1, 200]
    assert box[4:12].tolist() == [5, 9, 3, 7, 0, 0, 0, 0]
    assert box[36:44].tolist() == [200, 201, 201, 202, 200, 200, 200, 200]
    assert box[68:76].tolist() == [1, 3, 5, 13, 16, 32, 64, 128]
    assert (boxes[[0, 1, 3]] == 99).all()


def test_a_pass_that_is_called_off_does_not_run() -> None:
    boxes = np.ones((4, 128), np.int32)
    Doorbell(boxes).call_off(Ticket(7, 8, mx.zeros(1)))
    assert boxes[3, :2].tolist() == [7, 0]


@pytest.mark.parametrize("rows", [8, 32])
def test_a_row_of_a_chain_sees_those_before_it(rows: int) -> None:
    bits = write_bits(read_tree(list(range(rows)), []), rows)
    assert bits == [2 ** (row + 1) - 1 for row in range(rows)]
