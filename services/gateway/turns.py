"""Conversations in a form that a model's chat template accepts.

Clients send whatever happened: two turns of one role, a result and a text in one message, late
instructions, interrupted calls. Many templates refuse such conversations, or silently drop a part
of them. Each form is tried with the template once, on a few words; a conversation is changed only
where the template does not render it as it is.
"""

import hashlib
import re
from collections.abc import Sequence
from itertools import islice, pairwise, takewhile
from typing import Any

from msgspec.structs import replace

from protocol.messages import ChatMessage
from services.gateway.template import PLAIN, ModelText, ProbeStyle
from services.gateway.tools.calls import ToolFunction
from services.gateway.tools.generic import describe_tools, write_calls, write_result

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")

Turns = list[ChatMessage]


class TurnFitter:
    """Fits conversations to one model's template."""

    def __init__(self, text: ModelText) -> None:
        self._text = text

    def fit(
        self, messages: Sequence[ChatMessage], functions: Sequence[ToolFunction]
    ) -> tuple[Turns, list[dict[str, Any]]]:
        """Return the messages, and the tools as the template lists them.

        Tools become text within the messages if the template does not support them, or does not
        render calls and results.
        """
        tools = [function.describe() for function in functions]
        turns = list(messages)
        called = any(message.tool_calls or message.role == "tool" for message in turns)
        style = self._find_style(has_tools=bool(tools), called=called)
        if style is None or not self._text.knows_tools:
            turns, tools, style = describe_tools(turns, functions), [], PLAIN
        elif called and "tool_calls" in self._text.template:
            turns = self._fit_calls(turns, style)
        if self._text.shows("user"):
            turns = self._fit_roles(self._fit_system(turns, style), style)
        return turns, tools

    def _find_style(self, *, has_tools: bool, called: bool) -> ProbeStyle | None:
        """Return how the template expects calls and results; None if it renders none."""
        known = "tool_calls" in self._text.template and self._text.shows("user")
        if not called or not known:
            return ProbeStyle(has_tools=has_tools)
        styles = (
            ProbeStyle(has_tools, short_ids, named)
            for named in (False, True)
            for short_ids in (False, True)
        )
        return next((s for s in styles if self._text.shows("user", "call", "tool", style=s)), None)

    def _fit_calls(self, turns: Turns, style: ProbeStyle) -> Turns:
        def shows(*roles: str) -> bool:
            return self._text.shows(*roles, style=style)

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

    def _fit_system(self, turns: Turns, style: ProbeStyle) -> Turns:
        """Keep system messages where the template accepts them; make others the user's."""
        leads = turns[0].role == "system" if turns else False
        roles = ("system", "user")[: len(turns)]
        if leads and not self._text.shows(*roles, style=style):
            turns = _join([_by_user(turns[0]), *turns[1:]], "user")
            leads = False
        if any(t.role == "system" for t in turns[1:]) and not self._takes_late_system(leads=leads):
            late = [_by_user(turn) if turn.role == "system" else turn for turn in turns[1:]]
            turns = _join([turns[0], *late], "user")
        return turns

    def _takes_late_system(self, *, leads: bool) -> bool:
        """Return True if instructions may be anywhere; some places are accepted by accident."""
        first = ("system",) if leads else ()
        places = (
            ("user", "system", "user"),
            ("user", "system", "assistant", "user"),
            ("user", "assistant", "system", "user"),
        )
        return all(self._text.shows(*first, *place) for place in places)

    def _fit_roles(self, turns: Turns, style: ProbeStyle) -> Turns:
        """Return alternating turns, if the template requires them."""
        shows = self._text.shows
        if any(map(_is_empty, turns)) and not shows("user", "empty", "user"):
            turns = [turn for turn in turns if not _is_empty(turn)]
        pairs = set(pairwise(turn.role for turn in turns))
        if ("user", "user") in pairs and not shows("user", "user"):
            turns = _join(turns, "user")
        if ("assistant", "assistant") in pairs and not shows(
            "user", "assistant", "assistant", "user"
        ):
            turns = _join(turns, "assistant")
        call = "call" if "tool_calls" in self._text.template else "assistant"
        if ("tool", "user") in pairs and not shows("user", call, "tool", "user", style=style):
            turns = _fold_into_results(turns)
        first = next((n for n, turn in enumerate(turns) if turn.role != "system"), len(turns))
        if turns[first:] and turns[first].role == "assistant" and not shows("assistant", "user"):
            turns = [*turns[:first], ChatMessage("user", ""), *turns[first:]]
        return turns


def _is_empty(turn: ChatMessage) -> bool:
    """Return True if the assistant neither said nor called anything."""
    return turn.role == "assistant" and not turn.content and not turn.tool_calls


def _by_user(turn: ChatMessage) -> ChatMessage:
    return replace(turn, role="user")


def _join(turns: Turns, role: str) -> Turns:
    """Merge adjacent turns of this role that call nothing."""
    joined: Turns = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last and last.role == turn.role == role and not (last.tool_calls or turn.tool_calls):
            joined[-1] = _join_two(last, turn)
        else:
            joined.append(turn)
    return joined


def _join_two(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return replace(
        first,
        content=_paragraphs(first.content, second.content),
        reasoning_content=_paragraphs(first.reasoning_content, second.reasoning_content),
    )


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _fold_into_results(turns: Turns) -> Turns:
    """Append the user's text after a result to that result."""
    folded: Turns = []
    for turn in turns:
        if folded and folded[-1].role == "tool" and turn.role == "user":
            folded[-1] = replace(folded[-1], content=_paragraphs(folded[-1].content, turn.content))
        else:
            folded.append(turn)
    return folded


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
            said = _paragraphs(said, turn.content)
            later.append(replace(turn, content=""))
        elif turn.role == "assistant" and said:
            later.append(replace(turn, content=_paragraphs(said, turn.content)))
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
