"""Which tokens an answer may continue with, given a grammar: llguidance behind three verbs.

The library is loaded by the first request that has a grammar. It works in line with what a
service does for others, so it has limits of its own here, and a grammar that exceeds them is an
error of its request. What it costs to compile is found out beforehand, in a process that may be
killed (`grammar_check.py`).
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError, UsageError
from protocol.messages import MAX_GRAMMAR_CHARACTERS

_BLANKS = r"[ ]{0,2}|\n[ \t]{0,16}"

MAX_GRAMMAR_BYTES = MAX_GRAMMAR_CHARACTERS
"""So much of an ordinary schema takes about 0.1 s to compile."""

AllowedMask = npt.NDArray[np.bool_]


def check_grammar(text: str) -> None:
    """Raises UsageError if this is no grammar, with the library's reason, or is too large.

    It may take any time: use `GrammarChecker` where others would have to wait.
    """
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise UsageError(
            f"the answer's grammar or schema has {size} bytes; "
            f"at most {MAX_GRAMMAR_BYTES} are taken: shorten it, descriptions first"
        )
    from llguidance import LLMatcher  # noqa: PLC0415  # heavy, rarely needed

    with _catch_panics(UsageError):
        reason = LLMatcher.validate_grammar(text, limits=_limits())
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

    def __init__(self, matcher: Any, vocabulary_size: int, stop_id: int, folder: Path) -> None:
        self._matcher = matcher
        self._size = vocabulary_size
        self.stop_id = stop_id
        """A token that ends the answer."""
        self._folder = folder

    @classmethod
    def start(cls, text: str, folder: Path, stop_ids: Iterable[int]) -> Self:
        """At an answer's beginning. Compiled grammars are kept for further answers.

        Args:
            text: the grammar (`messages.LogitsOptions.grammar`).
            folder: the model folder, for its tokenizer.
            stop_ids: the tokens that may end the answer where the grammar allows an end.

        Raises:
            UsageError: it cannot be used with this model.
        """
        stops = tuple(sorted(stop_ids))
        compiled, size = _compile(text, folder, stops)
        return cls(compiled.deep_copy(), size, stops[0], folder)

    def copy(self) -> "Grammar":
        """The same place, from which another continuation may be tried."""
        return Grammar(self._matcher.deep_copy(), self._size, self.stop_id, self._folder)

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def characters(self) -> dict[str, int]:
        """The tokens of single ASCII characters."""
        return _list_characters(self._folder)

    def advance(self, token: int) -> bool:
        """Take one more token; False, and no step, if it is not allowed here.

        Raises:
            ProtocolError: the grammar exceeds a limit here (so do the other methods).
        """
        with _catch_panics(ProtocolError):
            taken: int = self._matcher.try_consume_tokens([token])
        self._check()
        return taken == 1

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other; no step is taken."""
        # The library gives up for good on a token that it does not know.
        known = next((i for i, t in enumerate(tokens) if t >= self._size), len(tokens))
        with _catch_panics(ProtocolError):
            count = int(self._matcher.validate_tokens(list(tokens[:known])))
        self._check()
        return count

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count and not self._matcher.rollback(count):
            raise ProtocolError(f"the grammar cannot go back by {count} tokens")

    def compute_mask(self) -> AllowedMask:
        """[vocabulary] whether each token may come next."""
        with _catch_panics(ProtocolError):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            raise ProtocolError(
                f"the answer's grammar or schema costs too much ({reason}); simplify it"
            )


@lru_cache(maxsize=16)
def _compile(text: str, folder: Path, stop_ids: tuple[int, ...]) -> tuple[Any, int]:
    """The matcher at an answer's beginning, and the size of its vocabulary."""
    from llguidance import LLMatcher  # noqa: PLC0415  # heavy, rarely needed

    tokenizer = _tokenizer(folder, stop_ids)
    with _catch_panics(UsageError):
        matcher = LLMatcher(tokenizer, text, limits=_limits())
    if matcher.is_error():
        raise UsageError(f"the grammar cannot be used: {_first_line(matcher.get_error())}")
    return matcher, int(tokenizer.vocab_size)


@cache
def _limits() -> Any:
    """llguidance's own: symbols, the work to build the lexer (50,000 a ms), its states (1-2 kB
    each), and the work for one mask (fuel: 14,000 a ms, items: 20,000 a ms)."""
    from llguidance import LLParserLimits  # noqa: PLC0415  # heavy, rarely needed

    return LLParserLimits(
        max_grammar_size=200_000,
        initial_lexer_fuel=500_000,
        max_lexer_states=50_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
    )


@lru_cache(maxsize=4)
def _tokenizer(folder: Path, stop_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer  # noqa: PLC0415  # heavy, rarely needed

    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    try:
        return LLTokenizer(text, eos_token=list(stop_ids))
    # The library raises ValueError, or whatever a broken file leads it into.
    except Exception as error:
        raise UsageError(f"grammars cannot be used with this tokenizer: {error}") from error


@lru_cache(maxsize=4)
def _list_characters(folder: Path) -> dict[str, int]:
    tokenizer = _tokenizer(folder, (0,))
    spelt = {chr(code): tokenizer.tokenize_str(chr(code)) for code in range(33, 127)}
    return {character: ids[0] for character, ids in spelt.items() if len(ids) == 1}


@contextlib.contextmanager
def _catch_panics(kind: type[UsageError | ProtocolError]) -> Iterator[None]:
    """A panic of the library, which Python's `Exception` does not cover, is an error as others."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"the answer's grammar or schema breaks its library: {error}") from error


def _first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0][:300]
