"""Error messages for values that do not match their type."""

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
        lambda match, name: f"{name} must be {_BOUNDS[match[1]]} {match[2].removesuffix('.0')}",
    ),
    (
        re.compile(r"Expected `([^`]+)`, got `([^`]+)`"),
        lambda match, name: f"{name} must be {_kinds(match[1])}, not {_kinds(match[2])}",
    ),
    (
        re.compile(r"Expected `\w+` of length >= 1"),
        lambda _, name: f"{name} must not be empty",
    ),
    (
        re.compile(r"Expected `(\w+)` of length (>=|<=|==) (\d+)"),
        lambda match, name: f"{name} must have {_LENGTHS[match[2]]}{match[3]} {_unit(match[1])}",
    ),
    (
        re.compile(r"Expected `str` matching regex .*", re.DOTALL),
        lambda _, name: f"{name} does not have the right form",
    ),
    (
        re.compile(r"Invalid enum value (.*)", re.DOTALL),
        lambda match, name: f"{name} cannot be {match[1]}",
    ),
    (
        re.compile(r"Object contains unknown field `([^`]*)`"),
        lambda match, name: f"{_inside(name)}there is no {match[1]!r}",
    ),
    (
        re.compile(r"Object missing required field `([^`]*)`"),
        lambda match, name: f"{_inside(name)}{match[1]!r} is missing",
    ),
]
"""Patterns of the validator's messages, and our sentence given the value's name."""


def describe(error: msgspec.ValidationError) -> str:
    """Return the sentence, starting with the value's path: "temperature must be at most 2"."""
    matched = _PLACE.match(str(error))
    what, path = (matched["what"], matched["path"] or "") if matched else (str(error), "")
    name = path.lstrip(".") or _WHOLE
    for pattern, sentence in _SENTENCES:
        if match := pattern.fullmatch(what):
            return sentence(match, name)
    return f"{name}: {what}"


def _kinds(names: str) -> str:
    return " or ".join(_KINDS.get(name.strip(), name.strip()) for name in names.split("|"))


def _unit(kind: str) -> str:
    return "characters" if kind == "str" else "entries"


def _inside(name: str) -> str:
    return f"{name}: " if name != _WHOLE else ""
