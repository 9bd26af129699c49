"""Earlier calls and their results in a form that a model's chat template accepts."""

import hashlib
import re
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

from msgspec.structs import replace

from protocol.messages import ChatMessage
from services.gateway.template import PLAIN, ModelText, ProbeStyle
from services.gateway.tools.calls import ToolFunction
from services.gateway.tools.generic import describe_tools, write_calls, write_result
from services.gateway.turns import Turns, join_paragraphs

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


def fit_tools(
    text: ModelText, turns: Turns, functions: Sequence[ToolFunction]
) -> tuple[Turns, list[dict[str, Any]], ProbeStyle]:
    """Return the turns, the tools as the template lists them, and how it writes calls.

    Tools become text within the messages if the template does not support them, or does not render
    calls and results.
    """
    called = any(turn.tool_calls or turn.role == "tool" for turn in turns)
    style = _find_style(text, has_tools=bool(functions), called=called)
    if style is None or not text.knows_tools:
        return describe_tools(turns, functions), [], PLAIN
    if called and "tool_calls" in text.template:
        turns = _fit_calls(text, turns, style)
    return turns, [function.describe() for function in functions], style


def _find_style(text: ModelText, *, has_tools: bool, called: bool) -> ProbeStyle | None:
    """Return how the template expects calls and results; None if it renders none."""
    known = "tool_calls" in text.template and text.shows("user")
    if not called or not known:
        return ProbeStyle(has_tools=has_tools)
    styles = (
        ProbeStyle(has_tools, short_ids, named)
        for named in (False, True)
        for short_ids in (False, True)
    )
    return next((s for s in styles if text.shows("user", "call", "tool", style=s)), None)


def _fit_calls(text: ModelText, turns: Turns, style: ProbeStyle) -> Turns:
    def shows(*roles: str) -> bool:
        return text.shows(*roles, style=style)

    if not shows("user"):
        return turns
    if style.short_ids:
        turns = [_shorten_ids(turn) for turn in turns]
    if style.named:
        turns = _name_results(turns)
    if any(len(turn.tool_calls) > 1 for turn in turns) and not shows(
        "user", "calls", "tool", "tool"
    ):
        turns = _split_calls(turns)
    if not shows("user", "call", "user"):
        turns = _write_unanswered(turns)
    if not shows("user", "tool") or not shows("tool", "assistant", "user"):
        turns = _write_orphans(turns)
    if any(t.tool_calls and t.content for t in turns) and not shows("user", "said", "tool"):
        both = shows("user", "assistant", "call", "tool", "assistant", "user")
        turns = _say_apart(turns) if both else _say_later(turns)
    return turns


def _shorten_ids(turn: ChatMessage) -> ChatMessage:
    """Return the turn with ids of nine letters and digits."""
    calls = [{**call, "id": _shorten(call.get("id") or "")} for call in turn.tool_calls]
    call_id = _shorten(turn.tool_call_id) if turn.role == "tool" else ""
    return replace(turn, tool_calls=calls, tool_call_id=call_id)


def _shorten(call_id: str) -> str:
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def _name_results(turns: Turns) -> Turns:
    """Add the name of the tool to each result."""
    names = {call.get("id"): call["function"]["name"] for turn in turns for call in turn.tool_calls}
    return [
        replace(turn, name=turn.name or names.get(turn.tool_call_id, ""))
        if turn.role == "tool"
        else turn
        for turn in turns
    ]


def _split_calls(turns: Turns) -> Turns:
    """Give each call its own turn, followed by its results."""
    split: Turns = []
    place = 0
    while place < len(turns):
        turn = turns[place]
        place += 1
        if len(turn.tool_calls) < 2:
            split.append(turn)
            continue
        results = list(takewhile(lambda turn: turn.role == "tool", islice(turns, place, None)))
        place += len(results)
        for call in turn.tool_calls:
            split.append(replace(turn, tool_calls=[call]))
            split += [result for result in results if result.tool_call_id == call.get("id")]
            results = [result for result in results if result.tool_call_id != call.get("id")]
            turn = replace(turn, content="", reasoning_content="")
        split += results
    return split


def _write_unanswered(turns: Turns) -> Turns:
    """Write calls without results as text, unless they are the last turn."""
    following = [*(turn.role for turn in turns[1:]), "tool"]
    return [
        write_calls(turn) if turn.tool_calls and after != "tool" else turn
        for turn, after in zip(turns, following, strict=True)
    ]


def _write_orphans(turns: Turns) -> Turns:
    """Write results without a preceding call as text of the user's."""
    written: Turns = []
    answers_call = False
    for turn in turns:
        answers_call = bool(turn.tool_calls) or (answers_call and turn.role == "tool")
        written.append(turn if answers_call or turn.role != "tool" else write_result(turn))
    return written


def _say_apart(turns: Turns) -> Turns:
    """Make text before a call a separate turn."""
    return [part for turn in turns for part in _split_said(turn)]


def _say_later(turns: Turns) -> Turns:
    """Move text before calls to the answer after them, if there is one yet."""
    later: Turns = []
    said, place = "", 0
    for turn in turns:
        if turn.tool_calls and turn.content:
            place = place if said else len(later)
            said = join_paragraphs(said, turn.content)
            later.append(replace(turn, content=""))
        elif turn.role == "assistant" and said:
            later.append(replace(turn, content=join_paragraphs(said, turn.content)))
            said = ""
        else:
            later.append(turn)
    if said:
        later.insert(place, ChatMessage("assistant", said))
    return later


def _split_said(turn: ChatMessage) -> Turns:
    if not turn.tool_calls or not turn.content:
        return [turn]
    return [replace(turn, tool_calls=[]), replace(turn, content="", reasoning_content="")]
