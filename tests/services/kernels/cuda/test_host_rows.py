"""Rows of a pass that the device writes into the host's memory."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from services.kernels.cuda import host_rows
from services.kernels.cuda.host_rows import HostRows, SentRows, open_host_rows, pending
from tests.services.kernels.cuda.host import compile_kernel, run_kernel

WIDTH = 6


def boxes_of(monkeypatch: pytest.MonkeyPatch) -> HostRows:
    """Rows are there at once."""

    def launch(rows: mx.array, box: npt.NDArray[np.uint8]) -> mx.array:
        box[:] = np.frombuffer(np.array(rows).tobytes(), np.uint8)
        return mx.ones(1, mx.int32)

    monkeypatch.setattr(host_rows, "_launch", launch)
    return HostRows(np.zeros((8, 32 * WIDTH * 2), np.uint8), WIDTH, mx.float16)


@pytest.mark.parametrize(("words", "threads"), [(1, 4), (7, 3), (12, 4), (5, 5)])
def test_threads_send_all_words_together(tmp_path: Path, words: int, threads: int) -> None:
    program = compile_kernel("host_rows_host.cpp", tmp_path / "send")
    given = np.arange(100, 100 + words)
    found = run_kernel(program, words, threads, given)
    assert found.tolist() == [*given, 77]


def test_rows_of_several_passes_are_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And any of them, as numpy takes them; a copy stays when others come."""
    boxes = boxes_of(monkeypatch)
    passes = [mx.random.normal((rows, WIDTH)).astype(mx.float16) for rows in (3, 1, 32, 2)]
    sent = [boxes.send(rows) for rows in passes]
    for rows, one in zip(passes, sent, strict=True):
        assert isinstance(one, SentRows)
        assert pending(one).item() == 1
        assert len(one) == len(rows)
        np.testing.assert_array_equal(np.array(one), np.array(rows))
    assert isinstance(sent[2], SentRows)
    np.testing.assert_array_equal(np.asarray(sent[2][4:7])[[0, 2]], np.array(passes[2])[[4, 6]])


def test_rows_are_waited_for_though_nothing_else_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt's last tokens, say, whose logits nobody computes."""
    boxes = boxes_of(monkeypatch)
    sent = boxes.send(mx.ones((2, WIDTH), mx.float16))
    waited: list[mx.array] = []
    monkeypatch.setattr(mx, "eval", waited.append)
    np.array(sent)
    assert waited == [pending(sent)]


def test_other_rows_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a prompt, say."""
    boxes = boxes_of(monkeypatch)
    many, wide, whole = mx.zeros((33, WIDTH), mx.float16), mx.zeros((2, 8), mx.float16), mx.zeros(6)
    for rows in (many, wide, whole[None]):
        assert boxes.send(rows) is rows
        assert pending(rows) is rows


def test_rows_are_not_taken_for_those_of_a_later_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = boxes_of(monkeypatch)
    rows = mx.zeros((2, WIDTH), mx.float16)
    first = boxes.send(rows)
    for _ in range(7):
        boxes.send(rows)
    np.array(first)
    boxes.send(rows)
    with pytest.raises(RuntimeError, match="read after their memory was reused"):
        np.array(first)


def test_elsewhere_than_on_cuda_nothing_is_sent() -> None:
    boxes = open_host_rows(8, mx.float16)
    assert (boxes is not None) is mx.cuda.is_available()
    assert open_host_rows(8, mx.float16) is boxes, "boxes are used in turn, whoever reads"
    assert open_host_rows(8, mx.bfloat16) is None


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_the_device_sends_what_it_has_computed(dtype: mx.Dtype) -> None:
    """While a pass behind it is at work."""
    boxes = open_host_rows(512, dtype)
    assert boxes is not None
    given = [mx.random.normal((rows, 512)).astype(dtype) for rows in (1, 8, 32)]
    sent = [boxes.send(rows * 2) for rows in given]
    mx.async_eval([pending(one) for one in sent])
    behind = mx.random.normal((2048, 2048))
    mx.async_eval(behind @ behind)
    for rows, one in zip(given, sent, strict=True):
        mx.eval(pending(one))
        np.testing.assert_array_equal(np.array(one), np.array(rows * 2))
