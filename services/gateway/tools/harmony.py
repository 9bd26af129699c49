"""gpt-oss' answers: messages in channels, of which `final` is the answer.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

import json
import re

from services.gateway.reasoning import Thought
from services.gateway.tools.calls import ParsedCall, new_call_id

FINAL_CHANNEL = "<|channel|>final<|message|>"
"""Start of the answer itself."""
THOUGHT_END = "<|end|><|start|>assistant"

_MESSAGE = "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_END = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_LONGEST_MARK = len("<|constrain|>")


def write_thought(thought: str) -> str:
    """Return a thought as these models write it; empty for none."""
    return f"<|channel|>analysis{_MESSAGE}{thought}{THOUGHT_END}" if thought else ""


class HarmonyReader:
    """Splits a streamed answer into thoughts, text and calls."""

    def __init__(self, *, begun: bool = False) -> None:
        """Start reading; `begun`: the prompt ends within the final channel."""
        self._held = ""
        self._channel = "final" if begun else ""
        self._recipient = ""
        self._inside = begun
        """True while reading a message's text, rather than its header."""

    @property
    def is_thinking(self) -> bool:
        """True if the latest text is within a thought."""
        return self._inside and self._channel == "analysis" and not self._recipient

    def push(self, text: str) -> list[Thought | str | ParsedCall]:
        """Return what is certain, in order."""
        self._held += text
        found: list[Thought | str | ParsedCall] = []
        while self._read_message(found) if self._inside else self._read_header():
            pass
        return found

    def end(self, *, cut_off: bool = False) -> list[Thought | str | ParsedCall]:
        """Return what was held back; a call is complete if its arguments are."""
        del cut_off
        held, self._held = self._held, ""
        if self._inside:
            return self._give(held)
        # An answer without channels is text.
        return [held] if held.strip() and not held.startswith("<|") else []

    def _read_header(self) -> bool:
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else ""
        self._held, self._inside = rest, True
        return True

    def _read_message(self, found: list[Thought | str | ParsedCall]) -> bool:
        end = _END.search(self._held)
        if end:
            found += self._give(self._held[: end.start()])
            keep = end[0] == "<|channel|>"
            self._held = self._held[end.start() if keep else end.end() :]
            self._inside = False
            return True
        if not self._recipient:
            at = self._held.rfind("<|", max(0, len(self._held) - _LONGEST_MARK))
            at = at if at >= 0 else len(self._held) - self._held.endswith("<")
            found += self._give(self._held[:at])
            self._held = self._held[at:]
        return False

    def _give(self, text: str) -> list[Thought | str | ParsedCall]:
        if self._recipient:
            return [ParsedCall(self._recipient, text.strip(), new_call_id(), _is_object(text))]
        if not text:
            return []
        return [Thought(text)] if self._channel == "analysis" else [text]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
