"""What a round that waits reads of the host, and sends to it."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from services.kernels.cuda import branch_doorbell as doorbell
from services.kernels.cuda.branch_doorbell import VIEW, BranchDoorbell, Branches
from services.kernels.cuda.doorbell import Ticket
from tests.services.kernels.cuda.host import compile_kernel, halve_words, run_kernel

RANDOM = np.random.default_rng(0)


def bell() -> BranchDoorbell:
    return BranchDoorbell(np.full((4, doorbell._WORDS), -7, np.int32))


def branches(count: int, base: int = 200) -> Branches:
    views = RANDOM.random((count, VIEW)) < 0.5
    forks = RANDOM.integers(0, count, (3, 2 * count))
    rules = [RANDOM.integers(0, 2**32, (count, 6), np.uint32) for _ in range(3)]
    return Branches(list(range(40, 40 + count)), 90 + np.arange(count), base, views, forks, rules)


def test_both_sides_mean_the_same_words() -> None:
    text = Path(doorbell.__file__).with_name("doorbell.cuh").read_text("utf-8")
    words = dict(re.findall(r"(\w+) = (\d+)", text))
    for name in ("TOKENS", "POSITIONS", "FORKS", "RULES", "VIEWS", "FOUND_WORDS"):
        assert int(words[name]) == getattr(doorbell, f"_{name}")
    assert (int(words["VIEW"]), int(words["RULE_WORDS"])) == (VIEW, doorbell.RULE_WORDS)


def test_branches_are_written_down_with_their_ticket() -> None:
    """Another round's box is left alone, and nothing of what was there before stays."""
    boxes, expected = bell(), branches(3)
    boxes.ring_for(Ticket(6, 8, mx.zeros(1)), expected)
    box = boxes._boxes[2]
    assert box[:3].tolist() == [6, 1, 200]
    assert box[4:10].tolist() == [40, 41, 42, 0, 0, 0]
    assert box[36:40].tolist() == [90, 91, 92, 0]
    assert box[68:164].reshape(3, 32)[:, :6].tolist() == expected.forks.tolist()
    assert not box[doorbell._DONE : doorbell._FOUND].any()
    assert (boxes._boxes[[0, 1, 3]] == -7).all()


def test_rows_see_what_they_are_told_to(tmp_path: Path) -> None:
    """Without a ring only themselves; a token that was rejected is passed over."""
    program = compile_kernel("branch_doorbell_host.cpp", tmp_path / "doorbell")
    rows, slots, base, first = 5, 768, 150, 700
    expected, boxes = branches(rows, base), bell()
    boxes.ring_for(Ticket(1, 8, mx.zeros(1)), expected)
    words = boxes._boxes[1][doorbell._VIEWS :][: rows * VIEW // 32].view(np.uint32)
    ids, numbers = [9, 4, 7, 5], RANDOM.random(300).astype(np.float32)
    out = run_kernel(
        program, base, first, rows, slots, halve_words(words), 4, 1, 4, ids, 300, 1, 6, numbers
    )
    visible_slots = np.zeros((2, rows, slots), np.bool_)
    visible_slots[:, np.arange(rows), first + np.arange(rows)] = True
    visible_slots[1, :, :base] = True
    visible_slots[1, :, base : base + VIEW] |= expected.views
    np.testing.assert_array_equal(
        out[: visible_slots.size].reshape(visible_slots.shape), visible_slots
    )
    assert out[visible_slots.size] == 7  # the second of those that are not 4
    np.testing.assert_array_equal(out[visible_slots.size + 1 : -1], numbers)
    assert out[-1] == 6


def test_what_is_read_belongs_to_the_round() -> None:
    boxes = bell()
    ticket, _ = boxes.issue(8, 300)
    boxes.ring_for(ticket, branches(3))
    box, shape = boxes._box(ticket), (2, 8, 16)
    guesses = RANDOM.random(shape).astype(np.float32)
    box[doorbell._FOUND + doorbell._FOUND_WORDS :][: guesses.size] = guesses.view(np.int32).ravel()
    box[doorbell._DONE : doorbell._DONE + 2] = ticket.number
    assert boxes.is_rung(ticket)
    np.testing.assert_array_equal(boxes.read(ticket, 1, shape), guesses)
    box[doorbell._DONE] = -ticket.number
    assert not boxes.is_rung(ticket)
    with pytest.raises(RuntimeError, match="too late"):
        boxes.read(ticket, 0, shape)
    boxes.ring_for(Ticket(ticket.number + 4, 8, mx.zeros(1)), branches(2))
    with pytest.raises(RuntimeError, match="reused"):
        boxes.read(ticket, 1, shape)


def test_a_device_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "_TIMEOUT_S", 0.0)
    boxes = bell()
    ticket, _ = boxes.issue(8, 300)
    boxes.ring_for(ticket, branches(3))
    with pytest.raises(TimeoutError):
        boxes.read(ticket, 0, (2, 8, 16))


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_reads_forks_and_tells() -> None:
    """A pass over branches, then one over the tokens chosen after them."""
    boxes, rows, slots, expected = doorbell.open_branch_doorbell(), 8, 256, branches(3, 50)
    assert boxes is not None
    expected = expected._replace(forks=np.array([[0, 0, 2], [0, 1, 0], [-1, -1, 3]]))
    ticket, call = boxes.issue(rows, 100)
    waiting = boxes.await_branches(call, rows, slots, 3)
    guesses = (
        mx.broadcast_to(mx.arange(16, dtype=mx.float32), (2, rows, 16)) + waiting.tokens[:, None]
    )
    tokens, positions, visible = boxes.fork(waiting, guesses, call)
    sent = boxes.send(guesses, waiting.rung, call, 1)
    boxes.launch(sent, tokens, positions, visible, *waiting)
    boxes.ring_for(ticket, expected)
    assert boxes.read(ticket, 1, (2, rows, 16))[0, :3, 0].tolist() == [40, 41, 42]
    assert tokens[:3].tolist() == [40, 41, 42]
    assert positions[:3].tolist() == [91, 91, 93]
    visible_slots = np.zeros(slots, np.bool_)
    visible_slots[:50] = True
    visible_slots[50:256] = expected.views[2, :206]
    visible_slots[[102, 100 + rows + 2]] = True
    np.testing.assert_array_equal(np.array(visible[2]), visible_slots)
