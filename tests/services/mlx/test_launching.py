"""Passes handed over in pieces."""

from typing import Any

import mlx.core as mx
import pytest

from services.mlx import launching


@pytest.mark.parametrize(
    ("layers", "pieces"), [(3, [3]), (30, [4, 9, 9]), (31, [4, 9, 9]), (32, [4, 9, 9, 9])]
)
def test_a_pass_is_launched_in_pieces(
    monkeypatch: pytest.MonkeyPatch, layers: int, pieces: list[int]
) -> None:
    """The first ones are short, and the last one comes with the logits."""
    started: list[list[Any]] = []
    monkeypatch.setattr(launching.mx, "async_eval", started.append)
    keys = [mx.array(layer) for layer in range(layers)]
    launching.launch_in_pieces(keys)
    assert [len(some) for some in started] == pieces
    assert [key for some in started for key in some] == keys[: sum(pieces)]
