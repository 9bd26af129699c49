"""What is wrong with a value that does not fit its type, in words for people."""

import re
from collections.abc import Callable

import msgspec

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<place>key in )?\$?(?P<path>[^`]*)`)?$", re.DOTALL)
_KINDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false",
    "array": "a list", "object": "a table of names and values", "null": "nothing",
}  # fmt: skip
_WHOLE = "the value"
_LENGTHS = {">=": "at least ", "<=": "at most ", "==": ""}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_SENTENCES: list[tuple[re.Pattern[str], Callable[[re.Match[str], str], str]]] = [
    (
        re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)"),
        lambda found, name: f"{name} must be {_BOUNDS[found[1]]} {found[2].removesuffix('.0')}",
    ),
    (
        re.compile(r"Expected `([^`]+)`, got `([^`]+)`"),
        lambda found, name: f"{name} must be {_kinds(found[1])}, not {_kinds(found[2])}",
    ),
    (
        re.compile(r"Expected `(\w+)` of length (>=|<=|==) (\d+)"),
        lambda found, name: f"{name} must have {_LENGTHS[found[2]]}{found[3]} {_unit(found[1])}",
    ),
    (
        re.compile(r"Expected `str` matching regex .*", re.DOTALL),
        lambda _, name: f"{name} does not have the right form",
    ),
    (
        re.compile(r"Invalid enum value (.*)", re.DOTALL),
        lambda found, name: f"{name} cannot be {found[1]}",
    ),
    (
        re.compile(r"Object contains unknown field `([^`]*)`"),
        lambda found, name: f"{_inside(name)}there is no {found[1]!r}",
    ),
    (
        re.compile(r"Object missing required field `([^`]*)`"),
        lambda found, name: f"{_inside(name)}{found[1]!r} is missing",
    ),
]
"""What the validator says, and what people read, given the value's name."""


def describe(error: msgspec.ValidationError) -> str:
    """The sentence, with the path of the value in front of it: "temperature must be at most 2"."""
    matched = _PLACE.match(str(error))
    what, path = (matched["what"], matched["path"] or "") if matched else (str(error), "")
    name = path.lstrip(".") or _WHOLE
    for pattern, sentence in _SENTENCES:
        if found := pattern.fullmatch(what):
            return sentence(found, name)
    return f"{name}: {what}"


def _kinds(names: str) -> str:
    return " or ".join(_KINDS.get(name.strip(), name.strip()) for name in names.split("|"))


def _unit(kind: str) -> str:
    return "characters" if kind == "str" else "entries"


def _inside(name: str) -> str:
    return f"in {name} " if name != _WHOLE else ""
