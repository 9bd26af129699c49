"""Conversations in a form that a model's chat template accepts.

Clients send whatever happened: two turns of one role, a result and a text in one message, late
instructions, interrupted calls. Many templates refuse such conversations, or silently drop a part
of them. Each form is tried with the template once, on a few words; a conversation is changed only
where the template does not render it as it is.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from protocol.messages import ChatMessage
from services.gateway.template import PLAIN, ModelText, ProbeStyle
from services.gateway.tools.calls import ToolFunction

Turns = list[ChatMessage]


class TurnFitter:
    """Fits conversations to one model's template."""

    def __init__(self, text: ModelText) -> None:
        self._text = text

    def fit(
        self, messages: Sequence[ChatMessage], functions: Sequence[ToolFunction]
    ) -> tuple[Turns, list[dict[str, Any]]]:
        """Return the messages, and the tools as the template lists them."""
        turns, tools, style = list(messages), list[dict[str, Any]](), PLAIN
        if functions or any(turn.tool_calls or turn.role == "tool" for turn in turns):
            from services.gateway.tools.turns import fit_tools  # noqa: PLC0415

            turns, tools, style = fit_tools(self._text, turns, functions)
        if self._text.shows("user"):
            turns = self._fit_roles(self._fit_system(turns, style), style)
        return turns, tools

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
        content=join_paragraphs(first.content, second.content),
        reasoning_content=join_paragraphs(first.reasoning_content, second.reasoning_content),
    )


def join_paragraphs(*texts: str) -> str:
    """Return the texts as paragraphs, without empty ones."""
    return "\n\n".join(filter(None, texts))


def _fold_into_results(turns: Turns) -> Turns:
    """Append the user's text after a result to that result."""
    folded: Turns = []
    for turn in turns:
        if folded and folded[-1].role == "tool" and turn.role == "user":
            folded[-1] = replace(
                folded[-1], content=join_paragraphs(folded[-1].content, turn.content)
            )
        else:
            folded.append(turn)
    return folded
