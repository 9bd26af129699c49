"""Extract text from content blocks and items of any type, known here or not.

A conversation started elsewhere may hold search results, documents, images, calls of tools on other
servers. Their text is shown to the model; everything else is dropped, named to the client, and
replaced by a placeholder.
"""

import base64
import binascii
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from services.gateway.body import check_free_form
from services.gateway.errors import invalid

_MEDIA = re.compile(r"image|audio|video|file(?!_search)|document|upload|screenshot")
_OPAQUE = re.compile(
    r"(?:.*_)?(?:id|ids|type|data|url_base64|b64_json|index|control|breakpoint|call_id)|status"
    r"|encrypted_.*|signature|citations|caller|fingerprint|annotations|logprobs|detail|image_url"
    r"|phase|execution|input_audio"
)
"""Fields without meaning for a model: ids, signatures, bytes."""
_BYTES = re.compile(r"(?:data:[^,]*,)?[A-Za-z0-9+/_=-]{256,}|data:[^,\s]*;base64,\S*")
_BARE = {"text", "value", "content", "thinking", "refusal"}
_BARE |= {"output", "outputs", "result", "results"}
"""Fields whose values need no label."""


TEXTS = {"text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"}
"""Types of parts that hold only text."""
_KINDS = {"image": "images", "audio": "audio", "video": "videos", "file": "files"}

Part = dict[str, Any]
"""A decoded content block or item."""

_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user", "unknown": "user"},
    **dict.fromkeys(("model", "ai", "bot", "critic", "discriminator"), "assistant"),
    **dict.fromkeys(("function", "ipython", "observation"), "tool"),
}
"""The roles of several servers and templates."""


def read_role(role: Any, where: str) -> str:
    """Return the role as templates know it; raises ApiError for one that no server has."""
    name = _ROLES.get(str(role or "user").lower())
    if name is None:
        raise invalid(f"{where}.role", f"there is no role {str(role)[:40]!r}")
    return name


def list_parts(content: Any) -> list[Part]:
    """Return the content's blocks; a text, or any other value, is a block of its own."""
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = ({"type": "text", "text": p} if isinstance(p, str) else p for p in parts)
    return [part if isinstance(part, dict) else {"text": part} for part in texts]


def read_thought(value: Any) -> str:
    """Return the text of a thought in any server's form; what is encrypted has none."""
    if isinstance(value, dict):
        places = ("thinking", "text", "summary", "content")
        return next(filter(None, (read_thought(value.get(name)) for name in places)), "")
    if isinstance(value, list):
        return "".join(map(read_thought, value))
    return value if isinstance(value, str) else ""


def is_thought(part: Part) -> bool:
    """Return True if a part of an assistant's content is a thought."""
    return part.get("type") in ("thinking", "reasoning")


def join_text(content: Any, ignored: list[str], where: str, separator: str = "") -> str:
    """Return the text of a content, its parts joined by the separator.

    Args:
        content: a text, or blocks of any types, or any other value.
        ignored: collects the names of dropped fields, which begin with `where`.
        where: the content's place in the request, such as "messages[].content[]".
        separator: between text parts; other parts get their own lines.

    Raises:
        ApiError: a part is nested too deeply.
    """
    if isinstance(content, str):
        return content
    joined, ends_line = "", True
    for part in list_parts(content):
        is_text = part.get("type") in TEXTS
        text = _read_text_part(part, ignored, where) if is_text else to_text(part, ignored, where)
        if joined and text:
            joined += separator if is_text and not ends_line else "\n"
        joined += text
        ends_line = not is_text if text else ends_line
    return joined


def _read_text_part(part: Part, ignored: list[str], where: str) -> str:
    name_unknown(part, {"type", "text", "refusal"}, ignored, where)
    text = part.get("text") or part.get("refusal") or ""
    return text if isinstance(text, str) else to_text(text, ignored, where)


def is_opaque(field: str) -> bool:
    """Return True if a field of this name has no meaning for a model."""
    return bool(_OPAQUE.fullmatch(field))


def name_unknown(part: Part, known: Collection[str], ignored: list[str], where: str) -> None:
    """Record the dropped fields of a part."""
    for field, value in part.items():
        if field not in known and value is not None:
            ignored.append(f"{where}.{field}")


def refuse_media_alone(content: Any, where: str) -> None:
    """Refuse a message without any readable text; raises ApiError.

    Only the message to be answered is checked: an image in an earlier turn must not end a
    conversation.
    """
    parts = list_parts(content)
    kinds = [str(part.get("type") or "") for part in parts]
    if parts and all(
        _is_media(kind) and not _find_plain_text(p) for kind, p in zip(kinds, parts, strict=True)
    ):
        what = next((name for kind, name in _KINDS.items() if kind in kinds[0]), "documents")
        raise invalid(where, f"{what} are not supported: this model reads text only")


def to_text(block: Any, ignored: list[str], where: str) -> str:
    """Return the text of a block of any type, or of a list of them (see `join_text`)."""
    check_free_form(block, where)
    return "\n".join(line for line in _read(block, "", ignored, where) if line)


def _is_media(kind: str) -> bool:
    return bool(_MEDIA.search(kind)) and not kind.endswith(("_result", "_call", "_output"))


def _read(value: Any, name: str, ignored: list[str], where: str) -> Iterator[str]:
    """Return its lines; `name` is shown before the first."""
    if isinstance(value, dict):
        yield from _read_block(value, ignored, where)
    elif isinstance(value, list):
        for part in value:
            yield from _read(part, name, ignored, where)
    elif isinstance(value, str):
        if _BYTES.fullmatch(value):
            ignored.append(f"{where}.{name or 'data'}")
            value = "[bytes left out: this model reads text only]"
        yield f"{name}: {value}" if name and value else value
    elif value is not None:
        yield f"{name}: {json.dumps(value)}" if name else json.dumps(value)


def _read_block(block: dict[str, Any], ignored: list[str], where: str) -> Iterator[str]:
    kind = str(block.get("type") or "")
    is_media = _is_media(kind)
    text = _find_plain_text(block)
    shown = [
        line
        for field, value in block.items()
        if not is_opaque(field) and not (is_media and field == "source")
        for line in _read(value, "" if field in _BARE else field, ignored, where)
    ]
    yield from shown
    if text is not None:
        yield text
    elif is_media:
        ignored.append(f"{where}.{kind}")
        yield f"[{kind} left out: this model reads text only]"
    elif not shown and kind:
        ignored.append(f"{where}.{kind}")


def _find_plain_text(block: dict[str, Any]) -> str | None:
    """Return the text of a plain-text document: given as text, as blocks, or as bytes."""
    source = block.get("source") or block.get("file") or block
    if not isinstance(source, dict):
        return None
    if source.get("type") == "content":
        return to_text(source.get("content"), [], "")
    data = source.get("data") or source.get("file_data")
    if not isinstance(data, str):
        return None
    return data if source.get("type") == "text" else _decode_text(data, source.get("media_type"))


def _decode_text(data: str, media_type: Any) -> str | None:
    """Decode a text from its bytes; None if they are something else."""
    if data.startswith("data:"):
        media_type, _, data = data[len("data:") :].partition(";base64,")
    if not str(media_type).startswith("text/"):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
