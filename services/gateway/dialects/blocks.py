"""Extract text from content blocks and items of any type, known here or not.

A conversation started elsewhere may hold search results, documents, images, calls of tools on other
servers. Their text is shown to the model; everything else is dropped, named to the client, and
replaced by a placeholder.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterator
from typing import Any

from services.gateway.body import check_free_form

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
_KINDS = {"image": "images", "audio": "audio", "video": "videos", "file": "files"}


def find_media(block: dict[str, Any]) -> str:
    """Return what a block is of which there is no text to read: images, say; empty if there is."""
    kind = str(block.get("type") or "")
    if not _is_media(kind) or _find_plain_text(block):
        return ""
    return next((name for word, name in _KINDS.items() if word in kind), "documents")


def is_opaque(field: str) -> bool:
    """Return True if a field of this name has no meaning for a model."""
    return bool(_OPAQUE.fullmatch(field))


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
