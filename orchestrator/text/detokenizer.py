"""Incremental detokenisation: from tokens to text, in whole characters.

A token represents bytes, and a character may be spread over several tokens, or the bytes form no
valid character. The bytes of byte-level and SentencePiece vocabularies are therefore concatenated
here and decoded as UTF-8; invalid UTF-8 becomes U+FFFD. Other vocabularies are decoded by the
library, over a window of the latest tokens.
"""

import codecs
import json
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from orchestrator.text.token_bytes import token_bytes
from protocol.messages import ShownToken, Tokens

_INVALID = "\ufffd"
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip"}
_LONGEST_CHARACTER = 16
"""Tokens that may be withheld until they complete a character."""


class Detokenizer:
    """The vocabulary of one model as bytes; shared by all answers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kind, self._leading_spaces = _kind_of(tokenizer)
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._bytes: dict[int, bytes] = {}

    def stream(self, *, shows_special: bool, hidden: frozenset[int]) -> "TextStream":
        """Create the text stream of a new answer.

        Args:
            shows_special: special tokens are text too.
            hidden: tokens that are none in any case.
        """
        skipped = hidden if shows_special else hidden | self._special
        if self._kind == "window":
            return TextStream(self, _WindowDecoder(self._tokenizer), skipped)
        return TextStream(self, _ByteDecoder(self, self._leading_spaces), skipped)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an id without a vocabulary entry."""
        data = self._bytes.get(token)
        if data is None:
            entry = self._tokenizer.id_to_token(token) or ""
            data = token_bytes(entry, byte_level=self._byte_level)
            self._bytes[token] = data
        return data


class _Decoder(Protocol):
    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        ...

    def end(self) -> str:
        """Return the text of the incomplete bytes at the end of the answer."""
        ...

    def bytes_of(self, token: int, text: str) -> bytes:
        """Return the bytes of the last pushed token, which completed `text`."""
        ...


class TextStream:
    """The text of one answer, streamed as soon as it is certain."""

    def __init__(
        self, detokenizer: Detokenizer, decoder: _Decoder, skipped: frozenset[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._decoder = decoder
        self._skipped = skipped

    def push(self, token: int) -> str:
        """Return the text that this token completes, possibly none."""
        return "" if token in self._skipped else self._decoder.push(token)

    def end(self) -> str:
        """Return the remaining incomplete bytes as U+FFFD, as OpenAI does."""
        return self._decoder.end()

    def describe(self, token: int, logprob: float) -> ShownToken:
        """Describe a token by itself."""
        data = self._detokenizer.bytes_of(token)
        return ShownToken(data.decode(errors="replace"), list(data), logprob)

    def describe_pushed(self, token: int, text: str, logprob: float) -> ShownToken:
        """Describe the last pushed token as a part of the text; `text` is what it completed.

        The concatenated bytes of all tokens are the bytes of the answer's text.
        """
        data = b"" if token in self._skipped else self._decoder.bytes_of(token, text)
        return ShownToken(text, list(data), logprob)


class _ByteDecoder:
    def __init__(self, detokenizer: Detokenizer, leading_spaces: int) -> None:
        self._detokenizer = detokenizer
        self._leading_spaces = leading_spaces
        """Spaces to remove from the beginning of the text."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._removed = 0
        """Spaces that were removed from the last token."""

    def push(self, token: int) -> str:
        text = self._utf8.decode(self._detokenizer.bytes_of(token))
        self._removed = 0
        if self._leading_spaces and text:
            self._removed = min(len(text) - len(text.lstrip(" ")), self._leading_spaces)
            self._leading_spaces = 0
        return text[self._removed :]

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)

    def bytes_of(self, token: int, text: str) -> bytes:
        del text
        return self._detokenizer.bytes_of(token)[self._removed :]


class _WindowDecoder:
    """Decodes the latest tokens together, since a token's text may depend on its neighbours."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: Tokens = []
        """Tokens whose text was returned last."""
        self._new: Tokens = []

    def push(self, token: int) -> str:
        self._new.append(token)
        before = self._decode(self._before)
        text = self._decode([*self._before, *self._new])
        is_longer = len(text) > len(before)
        if (text.endswith(_INVALID) or not is_longer) and len(self._new) < _LONGEST_CHARACTER:
            return ""
        self._before, self._new = self._new, []
        if text.startswith(before):
            return text[len(before) :]
        return self._decode(self._before) if is_longer else ""

    def end(self) -> str:
        before, text = self._decode(self._before), self._decode([*self._before, *self._new])
        self._new = []
        return text[len(before) :] if text.startswith(before) else ""

    def bytes_of(self, token: int, text: str) -> bytes:
        del token  # its text may depend on its neighbours
        return text.encode()

    def _decode(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False)) if tokens else ""


def _kind_of(tokenizer: Any) -> tuple[Literal["byte_level", "sentencepiece", "window"], int]:
    """Return the vocabulary's encoding and the number of leading spaces its decoder strips."""
    if tokenizer.decoder is None:
        return "window", 0
    parts = list(_flatten(json.loads(tokenizer.decoder.__getstate__())))
    names = {str(part.get("type")) for part in parts}
    if names == {"ByteLevel"}:
        return "byte_level", 0
    strips = [part for part in parts if part.get("type") == "Strip"]
    plain = all(part.get("content") == " " and not part.get("stop") for part in strips)
    if "ByteFallback" in names and names <= _SENTENCEPIECE and plain:
        return "sentencepiece", sum(int(part.get("start", 0)) for part in strips)
    return "window", 0


def _flatten(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _flatten(part)
    else:
        yield decoder
