"""The target's tokenizer and chat template, without importing `transformers`.

Everything is read from the model folder: tokens from `tokenizer.json`, the chat template from
`tokenizer_config.json` or `chat_template.jinja`, stop tokens from `config.json` and
`generation_config.json`.
"""

from pathlib import Path
from typing import Any

import jinja2
import msgspec
from tokenizers import Tokenizer

from orchestrator.text.detokenizer import Detokenizer, TextStream
from orchestrator.text.special_tokens import Marks, SpecialTokens
from protocol.decoding.chat_template import OutOfBounds, compile_template, read_template
from protocol.decoding.stop_tokens import read_json, read_stop_ids, token_text
from protocol.errors import ModelError, UsageError
from protocol.messages import ChatMessage, EncodePrompt, Tokens


class TargetTokenizer:
    """Converts text to tokens and back for one model folder.

    Args:
        folder: the model folder.
        parse_special: also parse special tokens in the text of messages.
    """

    def __init__(self, folder: Path, *, parse_special: bool = False) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"the model folder {str(folder)!r} has no tokenizer.json")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        # The library raises a bare Exception for a file it cannot read.
        except Exception as error:
            raise ModelError(f"{str(path)!r} is not a tokenizer description: {error}") from error
        self._config = read_json(folder / "tokenizer_config.json")
        source = read_template(folder, self._config)
        self._template = _compile(source, folder) if source else None
        self._knows_tools = "tools" in source
        self.stop_ids = read_stop_ids(folder)
        self._detokenizer = Detokenizer(self._tokenizer)
        written = source + "".join(self._special_tokens().values())
        is_mark = written.__contains__
        self._parse_special = parse_special
        self._special = SpecialTokens(self._tokenizer, is_mark)

    @property
    def has_template(self) -> bool:
        """True if the model has a chat template."""
        return self._template is not None

    @property
    def bos_id(self) -> int | None:
        """The token that begins every text, if the model has one."""
        token = self._tokenizer.token_to_id(token_text(self._config.get("bos_token")))
        return None if token is None else int(token)

    def encode(
        self,
        messages: list[ChatMessage],
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
        *,
        most_characters: int = 0,
    ) -> Tokens:
        """Return the prompt tokens of a conversation, ready for the assistant's answer.

        Without a chat template, the contents are joined as plain text. Special tokens that the
        messages spell are plain text (`special_tokens.py`).

        Raises:
            UsageError: the template rejects the messages, or does not support tools.
            OutOfBounds: the rendered text is longer than `most_characters`; 0 means unlimited.
        """
        if tools and not self._knows_tools:
            raise UsageError("this model's chat template knows no tools")
        turns = [{"content": "", **msgspec.to_builtins(m)} for m in messages]
        conversation = (turns, tools or [], options or {})
        marks = None if self._parse_special else _find_marks(self._special, *conversation)
        # Without a template the conversation is tokenised as ordinary text.
        special = self._template is None
        if marks is None:
            text = self._render(*conversation, most_characters=most_characters)
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        marked = [_mark_turn(turn, marks) for turn in turns], *map(marks.mark, conversation[1:])
        text = self._render(*marked, most_characters=most_characters)
        return self._special.encode(text, marks, add_special_tokens=special)

    def _render(
        self,
        turns: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: dict[str, Any],
        *,
        most_characters: int,
    ) -> str:
        """Render a conversation to text; errors as for `encode`."""
        if self._template is None:
            return "\n".join(turn["content"] for turn in turns)
        try:
            text = self._template.render(
                messages=turns,
                add_generation_prompt=True,
                tools=tools or None,
                **{**self._special_tokens(), **options},
            )
        except (OutOfBounds, MemoryError):
            raise
        # A template is a program shipped with the model: it may raise anything.
        except Exception as error:
            raise UsageError(f"the chat template refuses these messages: {error}") from error
        if 0 < most_characters < len(text):
            raise OutOfBounds
        return text

    def encode_prompt(self, prompt: EncodePrompt, most_characters: int = 0) -> Tokens:
        """Return the tokens of a request's prompt, including the prefix of its answer.

        Raises:
            UsageError: the chat template rejects it.
            OutOfBounds: the rendered text is too long (`encode`).
        """
        if prompt.text:
            return self.encode_text(prompt.text)
        tokens = self.encode(
            prompt.messages,
            prompt.tools,
            prompt.template_options,
            most_characters=most_characters,
        )
        return tokens + prompt.answer_tokens + self.encode_part(prompt.answer_start)

    def encode_text(self, text: str) -> Tokens:
        """Return the prompt tokens of a text to continue."""
        return list(self._tokenizer.encode(text).ids)

    def encode_part(self, text: str) -> Tokens:
        """Return the tokens of a text that follows others."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def stream(self, *, marks: bool = False) -> TextStream:
        """Create the text stream of a new answer.

        With `marks`, special tokens other than stops are text: some models mark tool calls by
        special tokens.
        """
        return self._detokenizer.stream(shows_special=marks, hidden=self.stop_ids)

    def _special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return {name: token_text(self._config.get(name)) for name in names}


def _find_marks(
    special: SpecialTokens,
    turns: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    options: dict[str, Any],
) -> Marks | None:
    """Return the marks for a conversation, or None if its text spells no special tokens."""
    outside = [
        {key: value for key, value in turn.items() if not _is_answer(turn, key)} for turn in turns
    ]
    answers = [turn[key] for turn in turns for key in turn if _is_answer(turn, key)]
    return special.find_marks([outside, tools, options], answers)


def _mark_turn(turn: dict[str, Any], marks: Marks) -> dict[str, Any]:
    return {
        key: marks.mark_answer(value) if _is_answer(turn, key) else marks.mark(value)
        for key, value in turn.items()
    }


def _is_answer(turn: dict[str, Any], key: str) -> bool:
    """Return True if this field of a turn holds text that the model wrote."""
    return turn["role"] == "assistant" and key in ("content", "reasoning_content")


def _compile(source: str, folder: Path) -> jinja2.Template:
    try:
        return compile_template(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template in {str(folder)!r} is broken: {error}") from error
