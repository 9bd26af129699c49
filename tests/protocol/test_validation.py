"""Errors of values name the value and what it may be, not the validator's types."""

from typing import Annotated, Any, Literal

import msgspec
import pytest

from protocol.validation import describe


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=3)] = "x"


class Values(msgspec.Struct, forbid_unknown_fields=True):
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] = 0.0
    count: Annotated[int, msgspec.Meta(gt=0)] = 1
    mode: Literal["ar", "ssd"] = "ssd"
    stop: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    device: Annotated[str, msgspec.Meta(pattern="^cpu$")] = "cpu"
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": 3.0}, "temperature must be at most 2"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"count": 0}, "count must be at least 1"),
        ({"count": "many"}, "count must be a whole number, not text"),
        ({"stop": "end"}, "stop must be a list or nothing, not text"),
        ({"stop": []}, "stop must not be empty"),
        ({"stop": ["a", 1]}, "stop[1] must be text, not a whole number"),
        ({"mode": "fast"}, "mode cannot be 'fast'"),
        ({"speed": 1}, "there is no 'speed'"),
        ({"inner": {"nam": 1}}, "inner: there is no 'nam'"),
        ({"inner": {"name": "long"}}, "inner.name must have at most 3 characters"),
        ({"inner": 1}, "inner must be a table of names and values or nothing, not a whole number"),
        ({"device": "gpu"}, "device does not have the right form"),
    ],
)
def test_what_is_wrong(values: dict[str, Any], sentence: str) -> None:
    """The path first, then what it must be."""
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(values, Values)
    assert describe(caught.value) == sentence


@pytest.mark.parametrize("kind", [int, list[int], dict[str, int], Values])
def test_every_error_has_a_sentence(kind: Any) -> None:
    """Whatever the validator says, nothing of it is lost."""
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(None, kind)
    assert describe(caught.value).startswith("the value must be ")
