"""Schemas of arguments: closed objects, without what a grammar cannot express."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote


def describe_arguments(parameters: dict[str, Any], root: str = "#") -> dict[str, Any]:
    """Return the schema of a forced call's arguments at `root`: `{}` if it has no parameters."""
    ways = {"properties", "anyOf", "oneOf", "const", "enum", "minProperties", *_OPENING}
    if any(parameters.get(way) for way in ways):
        kept = _keep_usable(close_objects(parameters))
        return {**_move_refs(kept, kept, root), "type": "object"}
    return {"type": "object", "properties": {}, "additionalProperties": False}


def close_objects(schema: Any) -> Any:
    """Return the schema with objects limited to their named properties.

    A model that may invent more properties continues until its tokens are spent. Objects that
    mention further properties themselves, or name none, stay unchanged.
    """
    if not isinstance(schema, dict):
        return schema
    closed = _map_parts(schema, close_objects)
    if "allOf" in schema:  # its parts hold together only
        closed["allOf"] = schema["allOf"]
    if schema.get("properties") and not _OPENING & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _map_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the schema with each schema directly within it changed."""
    mapped = dict(schema)
    for key in schema.keys() & (_NAMED | _PARTS):
        value = schema[key]
        if key in _NAMED and isinstance(value, dict):
            mapped[key] = {name: change(part) for name, part in value.items()}
        elif key in _PARTS:
            mapped[key] = [change(p) for p in value] if isinstance(value, list) else change(value)
    return mapped


def _keep_usable(schema: Any) -> Any:
    """Return the schema with the keywords that a grammar can express; {} for what is no schema."""
    if not isinstance(schema, dict):
        return schema if isinstance(schema, bool) else {}
    kept = {key: value for key, value in schema.items() if key in _CHECKS and _CHECKS[key](value)}
    if not all(map(_is_pattern, kept.get("patternProperties", ()))):
        del kept["patternProperties"]
    if "required" in kept and kept.get("additionalProperties") is False:
        kept["required"] = [name for name in kept["required"] if name in kept.get("properties", ())]
    return _map_parts(kept, _keep_usable)


def _move_refs(schema: Any, whole: Any, root: str) -> Any:
    """Return a part of `whole`, whose place has become `root`; references to nothing go."""
    if not isinstance(schema, dict):
        return schema
    moved = _map_parts(schema, lambda part: _move_refs(part, whole, root))
    place = moved.pop("$ref", "")
    return {**moved, "$ref": root + place[1:]} if _has_place(whole, place) else moved


def _has_place(schema: Any, place: str) -> bool:
    """Return True if `place` (`#/$defs/NAME`) is a schema within this one."""
    start, *names = unquote(place).split("/")
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, dict) else None
    return start == "#" and isinstance(schema, dict | bool)


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(isinstance(one, str) and one in _TYPES for one in types)


def _is_number(value: Any, least: float = -(2**53), most: float = 2**53) -> bool:
    return type(value) in (int, float) and least <= value <= most


def _is_pattern(value: Any) -> bool:
    """Return True for a regular expression, which has no assertions and references to groups."""
    if not isinstance(value, str) or re.search(r"\(\?[=!>(]|\(\?<[=!]|\\[1-9bBAzZ]", value):
        return False
    try:
        re.compile(re.sub(r"\\[pP]\{\w+\}", "a", value))  # classes that `re` does not know
    except (re.error, OverflowError, RecursionError):
        return False
    return True


_NAMED = {"properties", "$defs", "definitions", "patternProperties"}
"""Keywords whose keys are names, not keywords."""
_PARTS = {"items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf"}
"""Keywords whose values are schemas."""
_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"}
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_LEAST = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "const": lambda _: True,
    "format": lambda value: isinstance(value, str),
    "$ref": lambda value: isinstance(value, str),
    "pattern": _is_pattern,
    "required": lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value),
    "multipleOf": lambda value: _is_number(value, 1e-9),
    **dict.fromkeys(_LEAST, _is_number),
    **dict.fromkeys(_COUNTS, lambda value: type(value) is int and 0 <= value < 2**31),
    **dict.fromkeys(_NAMED, lambda value: isinstance(value, dict)),
    **dict.fromkeys(
        ("items", "additionalProperties"), lambda value: isinstance(value, dict | bool)
    ),
    **dict.fromkeys(
        ("enum", "prefixItems", "anyOf", "oneOf", "allOf"),
        lambda value: isinstance(value, list) and bool(value),
    ),
}
"""Whether a keyword's value can be part of a grammar."""
