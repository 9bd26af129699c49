"""Prevent the text of messages from being parsed as special tokens.

A chat template marks turns by special tokens. If a user's text, a tool result or a tool name that
spells one became one, a web page could end a turn and begin another. Prompts in which no message
spells a special token are tokenised as they are. In the others, punctuation in messages is replaced
by characters that occur nowhere else before the template is rendered. The special tokens in the
rendered text are then exactly those of the template: they are renamed to random strings, the
punctuation is restored, and the result is tokenised by a second tokenizer that recognizes the
special tokens by these random names only.
"""

import itertools
import re
import secrets
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from protocol.messages import Tokens

_SHORTEST_CORE = 4
"""Shortest inner part of a token, without its outer marks, that counts as spelling it: a template
may add those marks to a name.
"""
_FIRST_MARK = 0x20000
"""First of the ideographs used as marks: template filters, JSON and `repr` leave them unchanged."""
_MOST_SPLITS = 64


class Marks(NamedTuple):
    """The marking of the strings of one conversation."""

    mark: Callable[[Any], Any]
    """Marks untrusted text: a string, or all strings in a JSON value."""
    mark_answer: Callable[[str], str]
    """Marks earlier answers of the assistant, but not their reasoning and tool call tags."""
    restore: dict[int, str]
    """Translation table from marks back to the text."""


class SpecialTokens:
    """The special tokens of one tokenizer, and the encoding of text that spells them.

    Args:
        tokenizer: a tokenizer of the `tokenizers` library.
        is_mark: returns True for an added token that the chat template writes although it is
            not flagged as special, such as `<think>`.
    """

    def __init__(self, tokenizer: Any, is_mark: Callable[[str], bool]) -> None:
        self._tokenizer = tokenizer
        self._added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        protected = {
            number: token
            for number, token in self._added.items()
            if token.content.strip() and (token.special or is_mark(token.content))
        }
        self._protected = protected
        contents = [token.content for token in protected.values()]
        self._punctuation = {c for text in contents for c in text if _is_punctuation(c)}
        self._spelt = _match_any(_squash(_find_core(text)) for text in contents)
        self._any = _match_any(contents)
        self._in_answers = _match_any(t.content for t in protected.values() if t.special)
        self._wordlike = _match_any(text for text in contents if not self._punctuation & set(text))
        self._plain: _PlainTokenizer | None = None

    def find_marks(self, outside: list[Any], answers: list[str]) -> Marks | None:
        """Return the marks for a conversation, or None if no string spells a special token.

        Args:
            outside: JSON values that hold untrusted text.
            answers: texts that the assistant wrote.
        """
        strings = list(_list_strings(outside))
        spelt = self._spelt.search(_squash("".join(strings)))
        if not spelt and not any(self._in_answers.search(text) for text in answers):
            return None
        taken = set().union(*strings, *answers)
        free = (chr(n) for n in itertools.count(_FIRST_MARK) if chr(n) not in taken)
        replaced = self._punctuation | {t.content[0] for t in self._protected.values()}
        marks: dict[str, str] = dict(zip(sorted(replaced), free, strict=False))
        table = {ord(c): marks[c] for c in self._punctuation}

        def mark_first(match: re.Match[str]) -> str:
            token = str(match[0])
            return marks[token[0]] + token[1:]

        def mark_string(text: str) -> str:
            return self._wordlike.sub(mark_first, text).translate(table)

        return Marks(
            lambda value: _map_strings(value, mark_string),
            lambda text: self._in_answers.sub(mark_first, text),
            {ord(mark): original for original, mark in marks.items()},
        )

    def encode(self, marked: str, marks: Marks, *, add_special_tokens: bool = False) -> Tokens:
        """Tokenise a rendered text whose messages were marked."""
        if self._plain is None:
            self._plain = _PlainTokenizer(self._tokenizer, self._added, self._protected)
        names = self._plain.names
        renamed = self._any.sub(lambda match: names[match[0]], marked).translate(marks.restore)
        return self._plain.encode(renamed, add_special_tokens=add_special_tokens)


class _PlainTokenizer:
    """The tokenizer with renamed special tokens; it shares the vocabulary."""

    def __init__(self, tokenizer: Any, added: dict[int, Any], protected: dict[int, Any]) -> None:
        self.names = {token.content: _make_name() for token in protected.values()}
        self._separator = _make_name()
        self._original: Any = tokenizer
        self._protected = frozenset(protected)
        plain: Any = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            plain.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            plain.pre_tokenizer = tokenizer.pre_tokenizer
        self._plain = plain
        self._numbers: dict[int, int | None] = {}
        """Original id by the renamed tokenizer's id of an added token; None is the separator."""
        for number, token in added.items():
            content: str = token.content
            self._add(self.names.get(content, content), token, number)
        self._add(self._separator, AddedToken(self._separator, normalized=False), None)

    def _add(self, name: str, token: Any, number: int | None) -> None:
        flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
        is_renamed = name != token.content
        normalized = token.normalized and not is_renamed
        self._plain.add_tokens([AddedToken(name, normalized=normalized, **flags)])
        self._numbers[self._plain.token_to_id(name)] = number

    def encode(self, text: str, *, add_special_tokens: bool) -> Tokens:
        """Tokenise a text in which only the renamed special tokens are special.

        Word-level and unigram vocabularies may contain a special token as an ordinary word; the
        text is split there.
        """
        encoded = self._plain.encode(text, add_special_tokens=False)
        for _ in range(_MOST_SPLITS):
            leaks = [
                span
                for number, span in zip(encoded.ids, encoded.offsets, strict=True)
                if number in self._protected and number not in self._numbers
            ]
            if not leaks:
                break
            for start, end in reversed(leaks):
                middle = (start + end) // 2
                after = text[middle:] if end - start > 1 else text[end:]
                text = text[: max(start, middle)] + self._separator + after
            encoded = self._plain.encode(text, add_special_tokens=False)
        if add_special_tokens:
            encoded = self._original.post_process(encoded)
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        numbers = (n if is_new else self._numbers.get(n, n) for n, is_new in pairs)
        return [number for number in numbers if number is not None]


def _make_name() -> str:
    """Return a random name that no text can contain by guessing."""
    return "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(12))


def _match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of these texts at a position, as the library matches."""
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _find_core(text: str) -> str:
    """Return the part of a token that a text must spell if the template writes its outer marks."""
    core = text[1:-1]
    is_clear = len(core) >= _SHORTEST_CORE and any(map(_is_punctuation, core))
    return core if is_clear else text


def _is_punctuation(character: str) -> bool:
    return not (character.isalnum() or character.isspace() or character == "_")


def _squash(text: str) -> str:
    """Remove what templates and normalizers may change: case, whitespace, character width."""
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return "".join(folded.casefold().split())


def _list_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, content in value.items():
            yield key
            yield from _list_strings(content)
    elif isinstance(value, Collection):
        for content in value:
            yield from _list_strings(content)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(content, change) for key, content in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, list) else value
