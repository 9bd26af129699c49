"""Keep the text of messages from being read as special tokens.

A chat template marks turns by special tokens. A user's text, a tool's result or a tool's name
that spells one must not become one, or a web page could end a turn and begin another. Prompts
in which no message spells any are tokenised as they are. In the others, punctuation of messages
is replaced by characters that occur nowhere else before the template is rendered. The special
tokens of the rendered text are then the template's own: they are renamed to random strings, the
punctuation is restored, and a second tokenizer reads the result, which knows the special tokens
under these random names only.
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
"""Characters within the outer marks of a token by which a text may spell it: a template may write
those marks around a name."""
_FIRST_MARK = 0x20000
"""Ideographs: filters of templates, JSON and `repr` leave them as they are."""
_MOST_SPLITS = 64


class Marks(NamedTuple):
    """How the strings of one conversation are marked."""

    mark: Callable[[Any], Any]
    """For text from outside: a string, or all strings in a JSON value."""
    mark_answer: Callable[[str], str]
    """For the assistant's earlier answers, whose own marks of thoughts and calls stand."""
    restore: dict[int, str]
    """Translates marks back."""


class SpecialTokens:
    """The special tokens of one tokenizer, and how text that spells them is tokenised.

    Args:
        tokenizer: of the `tokenizers` library.
        is_mark: whether an added token that is not flagged as special is written by the chat
            template all the same, as `<think>` is.
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
        """How to mark a conversation; None if none of its strings spells a special token.

        Args:
            outside: JSON values that hold text from outside.
            answers: texts of the assistant's.
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

        def mark_first(found: re.Match[str]) -> str:
            token = str(found[0])
            return marks[token[0]] + token[1:]

        def mark_string(text: str) -> str:
            return self._wordlike.sub(mark_first, text).translate(table)

        return Marks(
            lambda value: _map_strings(value, mark_string),
            lambda text: self._in_answers.sub(mark_first, text),
            {ord(mark): original for original, mark in marks.items()},
        )

    def encode(self, marked: str, marks: Marks, *, add_special_tokens: bool = False) -> Tokens:
        """The tokens of a rendered text whose messages were marked."""
        if self._plain is None:
            self._plain = _PlainTokenizer(self._tokenizer, self._added, self._protected)
        names = self._plain.names
        renamed = self._any.sub(lambda found: names[found[0]], marked).translate(marks.restore)
        return self._plain.encode(renamed, add_special_tokens=add_special_tokens)


class _PlainTokenizer:
    """The tokenizer with its special tokens under other names; it shares the vocabulary."""

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
        """From its numbers of added tokens to the original's; None: the separator."""
        for number, token in added.items():
            self._add(self.names.get(token.content, token.content), token, number)
        self._add(self._separator, AddedToken(self._separator, normalized=False), None)

    def _add(self, name: str, token: Any, number: int | None) -> None:
        flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
        is_renamed = name != token.content
        normalized = token.normalized and not is_renamed
        self._plain.add_tokens([AddedToken(name, normalized=normalized, **flags)])
        self._numbers[self._plain.token_to_id(name)] = number

    def encode(self, text: str, *, add_special_tokens: bool) -> Tokens:
        """The tokens of a text in which renamed special tokens are the only ones.

        Vocabularies of whole words or of unigrams may hold a special token as a word of its own;
        the text is split there.
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
        own = (n if is_new else self._numbers.get(n, n) for n, is_new in pairs)
        return [number for number in own if number is not None]


def _make_name() -> str:
    """A name that no text can hold, since nobody can guess it."""
    return "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(12))


def _match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the longest of these at a place, as the library looks for them."""
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _find_core(text: str) -> str:
    """What of a token a text has to spell, where a template writes the outer marks itself."""
    core = text[1:-1]
    is_clear = len(core) >= _SHORTEST_CORE and any(map(_is_punctuation, core))
    return core if is_clear else text


def _is_punctuation(character: str) -> bool:
    return not (character.isalnum() or character.isspace() or character == "_")


def _squash(text: str) -> str:
    """Without what templates and normalizers may remove or change: case, blanks, widths."""
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return "".join(folded.casefold().split())


def _list_strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
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
    return [_map_strings(one, change) for one in value] if isinstance(value, list) else value
