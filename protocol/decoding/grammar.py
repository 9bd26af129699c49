"""Which tokens an answer may continue with, given a grammar: llguidance behind three verbs.

The library is loaded by the first request that has a grammar.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError, UsageError

_BLANKS = r"[ ]{0,2}|\n[ \t]{0,16}"

MAX_GRAMMAR_BYTES = 128 * 1024
"""The models compile it in line with other work: so much takes about 0.1 s."""

Allowed = npt.NDArray[np.bool_]


def check_grammar(text: str) -> None:
    """Raises UsageError if this is no grammar, with the library's reason, or is too large.

    For the doors: it may take a while, which the orchestrator does not have.
    """
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise UsageError(
            f"the answer's grammar or schema has {size} bytes; "
            f"at most {MAX_GRAMMAR_BYTES} are taken: shorten it, descriptions first"
        )
    from llguidance import LLMatcher  # noqa: PLC0415  # heavy, rarely needed

    reason = LLMatcher.validate_grammar(text)
    if reason and not reason.startswith("WARNING"):
        raise UsageError(f"the answer's grammar or schema cannot be used: {_first_line(reason)}")


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that follows a schema."""
    return f"start: {json_rule(schema)}"


def json_rule(schema: Mapping[str, Any]) -> str:
    """The same as a part of a larger grammar.

    Whitespace is bounded: left to itself, a model may go on with blanks for ever.
    """
    options = {"whitespace_pattern": _BLANKS, **schema.get("x-guidance", {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


class Grammar:
    """A grammar, and how far an answer has come in it."""

    def __init__(self, matcher: Any, vocabulary_size: int) -> None:
        self._matcher = matcher
        self._size = vocabulary_size

    @classmethod
    def start(cls, text: str, folder: Path, stop_ids: Iterable[int]) -> Self:
        """At an answer's beginning.

        Args:
            text: the grammar (`messages.Sampling.grammar`).
            folder: the model folder, for its tokenizer.
            stop_ids: the tokens that may end the answer where the grammar allows an end.

        Raises:
            UsageError: it cannot be used with this model.
        """
        from llguidance import LLMatcher  # noqa: PLC0415  # heavy, rarely needed

        tokenizer = _tokenizer(folder, tuple(sorted(stop_ids)))
        matcher = LLMatcher(tokenizer, text)
        if matcher.is_error():
            raise UsageError(f"the grammar cannot be used: {_first_line(matcher.get_error())}")
        return cls(matcher, int(tokenizer.vocab_size))

    def copy(self) -> "Grammar":
        """The same place, from which another continuation may be tried."""
        return Grammar(self._matcher.deep_copy(), self._size)

    def advance(self, token: int) -> bool:
        """Take one more token; False, and no step, if it is not allowed here."""
        taken: int = self._matcher.try_consume_tokens([token])
        return taken == 1

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other; no step is taken."""
        # The library gives up for good on a token that it does not know.
        known = next((i for i, t in enumerate(tokens) if t >= self._size), len(tokens))
        return int(self._matcher.validate_tokens(list(tokens[:known])))

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count and not self._matcher.rollback(count):
            raise ProtocolError(f"the grammar cannot go back by {count} tokens")

    def compute_mask(self) -> Allowed:
        """[vocabulary] whether each token may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ProtocolError(f"the grammar failed: {_first_line(self._matcher.get_error())}")
        return np.unpackbits(bits, bitorder="little").view(np.bool_)


@lru_cache(maxsize=4)
def _tokenizer(folder: Path, stop_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer  # noqa: PLC0415  # heavy, rarely needed

    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    try:
        return LLTokenizer(text, eos_token=list(stop_ids))
    # The library raises ValueError, or whatever a broken file leads it into.
    except Exception as error:
        raise UsageError(f"grammars cannot be used with this tokenizer: {error}") from error


def _first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0][:300]
