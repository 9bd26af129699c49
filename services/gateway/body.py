"""Decode the bytes of a request into typed fields, within limits.

Clients send fields that this server does not know (`store`, `metadata`, those of other servers).
They are dropped and named in a response header and once in the log; with `strict` they are refused.
"""

import asyncio
import codecs
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as types
from starlette.requests import ClientDisconnect, Request

from protocol.validation import describe
from services.gateway.errors import ApiError, ClientLeft

T = TypeVar("T")

_log = logging.getLogger(__name__)

_BODY_S = 30.0
"""Longest wait for a body to arrive."""
MAX_DEPTH = 64
"""Maximum nesting of free-form values: schemas, template options."""
MAX_NODES = 50_000
"""Maximum number of values in them."""
_MOST_CONTAINERS = 50_000
"""Maximum number of objects and lists in a body."""
_MOST_COMMAS = 500_000
"""Maximum number of separators; high because a prompt may be a long list of tokens."""
_STEP = 64 * 1024
"""Bytes that are counted at once."""
_MOST_NAMES = 32
"""Unknown fields that are named."""

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F]..)|\\.", re.DOTALL
)
"""An escape: a pair of surrogates, half of one, or any other."""
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]-]")


async def read_body(request: Request, at_most: int) -> bytes:
    """Read the JSON body of a request.

    Raises:
        ApiError: it is too large, too slow, or not announced as JSON. A web page of another
            origin can send other content types without a preflight, so they are refused.
        ClientLeft: the client disconnected before all of it had arrived.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the body as application/json", code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        reason = f"send the body as it is: the content encoding {coding[:40]!r} is not read here"
        raise ApiError(415, reason, code="unsupported_media_type")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > at_most:
        raise _too_large(at_most)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > at_most:
                    raise _too_large(at_most)
    except TimeoutError as error:
        reason = f"the body did not arrive within {_BODY_S:g} s"
        raise ApiError(408, reason, code="request_timeout") from error
    except ClientDisconnect as error:
        raise ClientLeft from error
    return bytes(body).removeprefix(codecs.BOM_UTF8)


def check_values(body: bytes | bytearray) -> None:
    """Refuse a body of too many values before any of them is built; raises ApiError.

    Counting bytes takes milliseconds; strings are excluded only where they might matter.
    """
    if _holds_too_much(_count(body)) and _holds_too_much(_count_outside_strings(body)):
        reason = f"the body holds more than {_MOST_CONTAINERS} objects and lists"
        raise ApiError(413, f"{reason}, or more than {_MOST_COMMAS} values", code="too_many_values")


def _count(text: bytes | bytearray) -> tuple[int, int]:
    """Count the beginnings of objects and lists, and the commas."""
    return text.count(b"{") + text.count(b"["), text.count(b",")


def _holds_too_much(counts: tuple[int, int]) -> bool:
    containers, commas = counts
    return containers > _MOST_CONTAINERS or commas > _MOST_COMMAS


def _count_outside_strings(body: bytes | bytearray) -> tuple[int, int]:
    """Count in short steps, until it is too much: other threads go on between them."""
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    containers = commas = quotes = 0
    for at in range(0, len(text), _STEP):
        parts = text[at : at + _STEP].split(b'"')
        more = _count(b"".join(parts[quotes % 2 :: 2]))
        containers, commas = containers + more[0], commas + more[1]
        quotes += len(parts) - 1
        if _holds_too_much((containers, commas)):
            break
    return containers, commas


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes (max_body_bytes)"
    return ApiError(413, message, code="request_too_large")


def decode_body(body: bytes, kind: type[T], *, strict: bool = False) -> tuple[T, list[str]]:
    """Decode a body; return the request and the names of the dropped fields.

    Raises:
        ApiError: it holds too much, or a field is wrong, or unknown if `strict`.
    """
    check_values(body)
    try:
        fields: T
        fields, value = _decode(body, kind)
        unknown = _list_once(find_unknown(value, kind))
    except msgspec.ValidationError as error:
        raise to_field_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if strict:
        refuse_unknown(unknown)
    for name in unknown:
        _log_unknown(name)
    return fields, unknown


def _decode(body: bytes, kind: Any) -> tuple[Any, Any]:
    """Decode a body to its type and to plain values.

    Halves of surrogate pairs, from clients that cut a text within a character, and nulls where a
    field may be left out are accepted, since they would come again with every turn.
    """
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        if (mended := _ESCAPE.sub(_mend_surrogate, body)) == body:
            raise
        body, value = mended, msgspec.json.decode(mended)
    try:
        return msgspec.json.decode(body, type=kind), value
    except msgspec.ValidationError:
        # Numbers as texts, and whole ones with a point, are accepted as well.
        lenient = _drop_nulls(value, _inspect(kind))
        return msgspec.convert(lenient, kind, strict=False), value


def _mend_surrogate(escape: re.Match[bytes]) -> bytes:
    """Return an escape of JSON, or that of U+FFFD instead of half a surrogate pair."""
    return rb"\ufffd" if escape["half"] else escape[0]


def _drop_nulls(value: Any, kind: types.Type) -> Any:
    """Return a decoded value without the nulls of fields that cannot be null."""
    match kind:
        case types.UnionType(types=options):
            chosen = _choose(value, options)
            return value if chosen is None else _drop_nulls(value, chosen)
        case types.StructType(fields=fields) if isinstance(value, dict):
            known = {field.encode_name: field for field in fields}
            return {
                name: _drop_nulls(content, known[name].type) if name in known else content
                for name, content in value.items()
                if content is not None or name not in known or _may_be_null(known[name])
            }
        case types.ListType(item_type=item) if isinstance(value, list):
            return [_drop_nulls(c, item) for c in value if c is not None or _takes_null(item)]
        case types.DictType(value_type=item) if isinstance(value, dict):
            return {n: c for n, c in value.items() if c is not None or _takes_null(item)}
        case _:
            return value


def _may_be_null(field: types.Field) -> bool:
    return field.required or _takes_null(field.type)


def _takes_null(kind: types.Type) -> bool:
    options = kind.types if isinstance(kind, types.UnionType) else (kind,)
    return any(isinstance(o, types.NoneType | types.AnyType) for o in options)


def refuse_unknown(names: Sequence[str]) -> None:
    """Refuse a request from which fields were dropped, as a strict server does."""
    if names:
        message = f"unrecognised field {names[0]!r}: this server is strict and ignores none"
        raise ApiError(400, message, code="unknown_parameter", param=names[0])


def _list_once(names: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    seen: set[str] = set()
    for name in names:
        if name in seen:
            continue
        seen.add(name)
        found[_NOT_PLAIN.sub("_", name)[:64]] = None
        if len(found) >= _MOST_NAMES:
            break
    return list(found)


_logged: set[str] = set()


def _log_unknown(name: str) -> None:
    """Log an unknown field once per process, up to a maximum number of names."""
    if name not in _logged and len(_logged) < 1000:
        _logged.add(name)
        _log.info("requests have the field %r, which is ignored", name)


def to_field_error(error: msgspec.ValidationError) -> ApiError:
    """Return the error of a field that does not validate, with its path."""
    place = _PLACE.search(str(error))
    path = place["path"] if place else ""
    return ApiError(400, describe(error), code="invalid_value", param=path or None)


def check_free_form(value: Any, where: str) -> None:
    """Limit a free-form value; raises ApiError."""
    level: list[Any] = [value]
    nodes = 0
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one)]
        nodes += len(level)
        if not level:
            return
        if nodes > MAX_NODES:
            reason = f"{where} holds more than {MAX_NODES} values"
            raise ApiError(400, reason, code="invalid_value", param=where)
    reason = f"{where} is nested more than {MAX_DEPTH} deep"
    raise ApiError(400, reason, code="invalid_value", param=where)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def find_unknown(value: Any, kind: Any) -> Iterator[str]:
    """Return the paths of the fields in a decoded JSON value that its type does not have."""
    yield from _walk(value, _inspect(kind), "")


@cache
def _inspect(kind: Any) -> types.Type:
    return types.type_info(kind)


def _walk(value: Any, kind: types.Type, path: str) -> Iterator[str]:
    match kind:
        case types.UnionType(types=options):
            chosen = _choose(value, options)
            if chosen is not None:
                yield from _walk(value, chosen, path)
        case types.StructType(fields=fields) if isinstance(value, dict):
            known = {field.encode_name: field.type for field in fields}
            for name, content in value.items():
                place = f"{path}.{name}" if path else name
                if name in known:
                    yield from _walk(content, known[name], place)
                elif content is not None:
                    yield place
        case types.ListType(item_type=item) if isinstance(value, list):
            if isinstance(item, types.StructType | types.UnionType):
                for content in value:
                    yield from _walk(content, item, f"{path}[]")
        case _:
            return


def _choose(value: Any, options: Iterable[types.Type]) -> types.Type | None:
    """Return the option that a JSON value matches, if that option can hold others."""
    if isinstance(value, dict):
        kinds = types.StructType | types.DictType
        return next((o for o in options if isinstance(o, kinds)), None)
    if isinstance(value, list):
        return next((o for o in options if isinstance(o, types.ListType)), None)
    return None


def to_header(names: Iterable[str]) -> str:
    """Return field names as a header value."""
    return ", ".join(_list_once(names))
