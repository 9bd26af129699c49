"""Schemas of arguments: closed objects, without what a grammar cannot express."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote


def describe_arguments(parameters: dict[str, Any], root: str = "#") -> dict[str, Any]:
    """Return the schema of a forced call's arguments: `{}` for a function without parameters.

    What a grammar cannot express is left out.

    Args:
        parameters: the function's own schema.
        root: the place of the result in the schema that it becomes a part of.
    """
    ways = {"properties", "anyOf", "oneOf", "const", "enum", "minProperties", *_OPENING}
    if any(parameters.get(way) for way in ways):
        kept = _keep_usable(close_objects(parameters))
        closed: dict[str, Any] = _move_refs(kept, kept, root)
        return {**closed, "type": "object"}
    return {"type": "object", "properties": {}, "additionalProperties": False}


def close_objects(schema: Any) -> Any:
    """Return the schema with objects limited to their named properties.

    A model that may invent more properties continues until its tokens are spent. Objects that
    mention further properties themselves, or name none, stay unchanged.
    """
    if isinstance(schema, list):
        return [close_objects(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: _close_named(value) if key in _NAMED else close_objects(value)
        for key, value in schema.items()
        if key not in _LITERAL
    }
    closed.update({key: schema[key] for key in _LITERAL if key in schema})
    if schema.get("properties") and not _OPENING & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _close_named(schemas: Any) -> Any:
    """Close the objects in a map of names to schemas."""
    if not isinstance(schemas, dict):
        return schemas
    return {name: close_objects(schema) for name, schema in schemas.items()}


_NAMED = {"properties", "$defs", "definitions", "patternProperties"}
"""Keywords whose keys are names, not keywords."""
_DATA = {"const", "enum", "default", "examples"}
_LITERAL = _DATA | {"allOf"}
"""Keywords whose values are data, or that only hold together (allOf)."""
_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"}


def _keep_usable(schema: Any) -> Any:
    """Return the schema with those keywords alone that a grammar can express, as they stand here.

    What is not a schema becomes one that allows anything.
    """
    if not isinstance(schema, dict):
        return schema if isinstance(schema, bool) else {}
    kept = {key: value for key, value in schema.items() if _is_usable(key, value)}
    for key in kept.keys() & _NAMED:
        kept[key] = {
            name: _keep_usable(part)
            for name, part in kept[key].items()
            if key != "patternProperties" or _is_pattern(name)
        }
    for key in kept.keys() & _LISTS:
        kept[key] = [_keep_usable(part) for part in kept[key]]
    for key in kept.keys() & _PARTS:
        kept[key] = _keep_usable(kept[key])
    if "required" in kept and kept.get("additionalProperties") is False:
        names = kept.get("properties", ())
        kept["required"] = [name for name in kept["required"] if name in names]
    return kept


def _move_refs(schema: Any, whole: Any, root: str) -> Any:
    """Return the part of a schema whose place has become `root`; references to nothing go."""
    if isinstance(schema, list):
        return [_move_refs(part, whole, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value if key in _DATA else _move_refs(value, whole, root)
        for key, value in schema.items()
        if key not in _NAMED
    }
    for key in _NAMED & schema.keys():
        moved[key] = {name: _move_refs(part, whole, root) for name, part in schema[key].items()}
    if isinstance(place := schema.get("$ref"), str):
        del moved["$ref"]
        if _has_place(whole, place):
            moved["$ref"] = root + place[1:]
    return moved


def _has_place(schema: Any, place: str) -> bool:
    """Return True if `place` (`#/$defs/NAME`) is a schema within this one."""
    start, *names = unquote(place).split("/")
    for name in names:
        if isinstance(schema, list):
            schema = {str(number): part for number, part in enumerate(schema)}
        key = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, dict) else None
    return start == "#" and isinstance(schema, dict | bool)


def _is_usable(key: str, value: Any) -> bool:
    """Return True if a grammar can express this keyword with this value."""
    if key in _NAMED:
        return isinstance(value, dict)
    if key in _LISTS:
        return isinstance(value, list) and bool(value)
    if key in _PARTS:
        return isinstance(value, dict | bool)
    return key in _CHECKS and _CHECKS[key](value)


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(isinstance(one, str) and one in _TYPES for one in types)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _is_factor(value: Any) -> bool:
    return _is_number(value) and value >= _SMALLEST_FACTOR


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, str) or _NOT_REGULAR.search(value):
        return False
    try:
        re.compile(_CLASS.sub("a", value))
    except (re.error, OverflowError, RecursionError):
        return False
    return True


_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
"""Keywords whose value is a list of schemas."""
_PARTS = {"items", "additionalProperties"}
"""Keywords whose value is a schema."""
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_LARGEST_COUNT, _LARGEST, _SMALLEST_FACTOR = 2**31 - 1, 2**53, 1e-9
_NOT_REGULAR = re.compile(r"\(\?[=!>(]|\(\?<[=!]|\\[1-9bBAzZ]")
"""Matches what no automaton can: assertions, references to groups."""
_CLASS = re.compile(r"\\[pP]\{\w+\}")
"""Matches a class of Unicode, which `re` does not know."""
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "const": lambda _: True,
    "format": lambda value: isinstance(value, str),
    "pattern": _is_pattern,
    "required": lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value),
    "$ref": lambda value: isinstance(value, str),
    "multipleOf": _is_factor,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        _is_count,
    ),
}
