"""Facts about a model's answers, from its chat template and tokens.

They are read from the model folder without `transformers`. The orchestrator renders prompts; the
gateway only needs to know how a prompt ends, because an answer may start within a thought.
"""

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec

from protocol.decoding.chat_template import compile_template, limit_work, read_template

_log = logging.getLogger(__name__)

_RENDER_S = 0.5
_RENDER_BYTES = 512 << 20
"""Far more than any template needs for a few words."""

_PREFIX_FIRST = "{0}{prefix}{1}{suffix}{2}"
_SUFFIX_FIRST = "{1}{suffix}{0}{prefix}"
_FILL_IN = (
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), _PREFIX_FIRST),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), _PREFIX_FIRST),
    (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), _PREFIX_FIRST),
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), _PREFIX_FIRST),  # noqa: RUF001
    (("[PREFIX]", "[SUFFIX]"), _SUFFIX_FIRST),
)
"""Tokens for filling in a text, and their order."""

_PROBE = "What is the answer to this question?"
_CALLS = {"call": 1, "calls": 2, "said": 1}
_PROBES = {"calls": 2, "said": 2, "empty": 0}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "",
        "parameters": {"type": "object", "properties": {"question": {"type": "string"}}},
    },
}


class ProbeStyle(NamedTuple):
    """How calls and results of a conversation are written."""

    has_tools: bool = False
    """True if the request has tools."""
    short_ids: bool = False
    """True if ids have nine letters and digits, as Mistral's templates require."""
    named: bool = False
    """True if results name the tool."""

    def make_id(self, number: int) -> str:
        """Return the id of a call."""
        return f"probe{number:04}" if self.short_ids else f"call_probe_{number:012}"


PLAIN = ProbeStyle()


class _AddedToken(msgspec.Struct):
    id: int = 0
    content: str = ""
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The fields used of `tokenizer.json`, which may have many megabytes."""

    added_tokens: list[_AddedToken] = []


def _is_special(token: _AddedToken) -> bool:
    return token.special or (token.content.startswith("<") and token.content.endswith(">"))


class ModelText:
    """One model folder's template and added tokens; a missing or broken file counts as empty."""

    def __init__(self, folder: Path | None = None) -> None:
        self.config: dict[str, Any] = {}
        self.template = ""
        self._tokenizer_file: Path | None = None
        if folder is not None:
            self.config = _read_json(folder / "tokenizer_config.json")
            self.template = read_template(folder, self.config)
            self._tokenizer_file = folder / "tokenizer.json"

    @property
    def knows_tools(self) -> bool:
        """True if its prompts can list tools."""
        return "tools" in self.template

    @cached_property
    def _names_tools(self) -> bool:
        """True if a plain prompt lists the tools by name."""
        text = _render(self.template, ("user",), b"{}", ProbeStyle(has_tools=True))
        return str(_TOOL["function"]["name"]) in text

    @cached_property
    def added_tokens(self) -> dict[str, bool]:
        """Added tokens, and whether each is special (hidden in text)."""
        return {token.content: token.special for token in self._added}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of those that grammars do not treat as text: llguidance's rule."""
        return {token.content: token.id for token in self._added if _is_special(token)}

    @cached_property
    def _added(self) -> list[_AddedToken]:
        if self._tokenizer_file is None or not self._tokenizer_file.is_file():
            return []
        try:
            data = self._tokenizer_file.read_bytes()
            return msgspec.json.decode(data, type=_TokenizerFile).added_tokens
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("%s cannot be read: %s", self._tokenizer_file, error)
            return []

    def fill_in(self, prefix: str, suffix: str) -> str | None:
        """Return a fill-in-the-middle prompt; None if the model has no tokens for it."""
        for marks, layout in _FILL_IN:
            if all(mark in self.added_tokens for mark in marks):
                return layout.format(*marks, prefix=prefix, suffix=suffix)
        return None

    def prompt_end(self, options: Mapping[str, Any]) -> str:
        """Return what the template puts between the user's last word and the answer.

        It is empty if that cannot be determined.
        """
        encoded = msgspec.json.encode(options, order="sorted")
        return _render(self.template, ("user",), encoded).rpartition(_PROBE)[2]

    def shows(self, *turns: str, style: ProbeStyle = PLAIN) -> bool:
        """Return True if a conversation of these turns is accepted and rendered completely.

        Args:
            turns: roles; `call` and `calls` are the assistant's with one call or two, `said` one
                with a text before the call, `empty` one with nothing.
            style: how calls and results are written.
        """
        if not self.template:
            return True
        text = _render(self.template, turns, b"{}", style)
        if style.has_tools and self._names_tools and _TOOL["function"]["name"] not in text:
            return False
        return text.count(_PROBE) == sum(_PROBES.get(turn, 1) for turn in turns)


@lru_cache(maxsize=1024)
def _render(
    template: str, turns: tuple[str, ...], options: bytes, style: ProbeStyle = PLAIN
) -> str:
    """Render a prompt in which each turn is the probe; empty if that fails."""
    if not template:
        return ""
    try:
        with limit_work(_RENDER_S, _RENDER_BYTES):
            text = _compile(template).render(
                messages=_write_turns(turns, style),
                add_generation_prompt=True,
                tools=[_TOOL] if style.has_tools else None,
                **msgspec.json.decode(options),
            )
    # A template is the model author's program: it can fail in any way.
    except Exception as error:  # noqa: BLE001
        why = str(error) or type(error).__name__
        _log.info("the chat template refuses the turns %s: %s", ", ".join(turns), why)
        return ""
    return text


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    return compile_template(template)


def _write_turns(turns: Sequence[str], style: ProbeStyle) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    ids = itertools.count()
    results = itertools.count()
    for turn in turns:
        role = "assistant" if turn in ("empty", *_CALLS) else turn
        message: dict[str, Any] = {
            "role": role,
            "content": "" if turn in ("call", "calls", "empty") else _PROBE,
        }
        if turn in _CALLS:
            message["tool_calls"] = [
                _write_call(style.make_id(next(ids))) for _ in range(_CALLS[turn])
            ]
        if turn == "tool":
            message["tool_call_id"] = style.make_id(next(results))
            message |= {"name": "probe"} if style.named else {}
        messages.append(message)
    return messages


def _write_call(call_id: str) -> dict[str, Any]:
    function = {"name": "probe", "arguments": {"question": _PROBE}}
    return {"type": "function", "id": call_id, "function": function}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}
