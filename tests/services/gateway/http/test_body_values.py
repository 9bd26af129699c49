"""Bodies of too many values are refused before any of them is built."""

import json

import pytest

from services.gateway import body
from services.gateway.body import check_values
from services.gateway.errors import ApiError


def test_texts_may_hold_anything() -> None:
    """What is within strings is no value, quotes and backslashes included."""
    text = '{"[,]\\\\' * 200_000
    check_values(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
    check_values(json.dumps({"prompt": list(range(400_000))}).encode())


@pytest.mark.parametrize(
    "value", ["{}," * 60_000 + "{}", "[" * 60_000, '"a",' * 600_000 + "1", '{"u":1},' * 60_000]
)
def test_too_many_values_are_refused(value: str) -> None:
    """Wherever they are, and whether it is JSON at all."""
    with pytest.raises(ApiError) as caught:
        check_values(b'{"x":[' + value.encode() + b"]}")
    assert caught.value.status == 413


@pytest.mark.parametrize("step", [1, 3, 100])
def test_values_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Wherever a step of the count ends: within an escape or not, with a string open or not."""
    monkeypatch.setattr(body, "_STEP", step)
    for text in ("", "a", '"', "\\", '{"[,', '\\"', '\\\\"', "}]"):
        value = {text: [text, {"": text}, [text, 1]]}
        assert body._count_outside_strings(json.dumps(value).encode()) == (4, 3)
