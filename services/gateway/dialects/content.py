"""Texts, roles and thoughts of messages; content of other types is read by `blocks`."""

from collections.abc import Collection
from typing import Any

from services.gateway.errors import invalid

_TEXTS = {"text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"}
"""Types of parts that hold only text."""
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
        is_text = part.get("type") in _TEXTS
        text = _read_text_part(part, ignored, where) if is_text else _read(part, ignored, where)
        if joined and text:
            joined += separator if is_text and not ends_line else "\n"
        joined += text
        ends_line = not is_text if text else ends_line
    return joined


def _read_text_part(part: Part, ignored: list[str], where: str) -> str:
    name_unknown(part, {"type", "text", "refusal"}, ignored, where)
    text = part.get("text") or part.get("refusal") or ""
    return text if isinstance(text, str) else _read(text, ignored, where)


def _read(value: Any, ignored: list[str], where: str) -> str:
    from services.gateway.dialects.blocks import to_text  # noqa: PLC0415

    return to_text(value, ignored, where)


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
    if not content or isinstance(content, str):
        return
    from services.gateway.dialects.blocks import find_media  # noqa: PLC0415

    media = [find_media(part) for part in list_parts(content)]
    if all(media):
        raise invalid(where, f"{media[0]} are not supported: this model reads text only")
