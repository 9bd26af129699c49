"""Grammar-constrained decoding: a narrow interface to llguidance.

A service loads the tokenizer before it serves (`load_tokenizer`): that takes seconds with Python's
lock held, without a sign of life. A grammar is compiled inline with the work for
other requests, so it has limits here, and exceeding them is an error of the grammar's request. The
cost of compiling is measured beforehand, in a process that may be killed (`GrammarChecker`).
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from protocol.decoding.stop_tokens import read_stop_ids
from protocol.errors import ProtocolError, UsageError
from protocol.messages import MAX_GRAMMAR_CHARACTERS

_BLANKS = r"[ ]{0,2}|\n[ \t]{0,16}"

AllowedMask = npt.NDArray[np.bool_]


def check_size(text: str) -> None:
    """Raise UsageError if a grammar is too large to be sent and compiled."""
    if (size := len(text.encode())) > MAX_GRAMMAR_CHARACTERS:
        raise UsageError(
            f"the answer's grammar or schema has {size} bytes; at most {MAX_GRAMMAR_CHARACTERS} "
            "are taken: shorten it, descriptions first"
        )


def check_grammar(text: str) -> None:
    """Raise UsageError if this is not a valid grammar, or is too large.

    May take any time: use `GrammarChecker` where others would have to wait.
    """
    check_size(text)
    from llguidance import LLMatcher  # noqa: PLC0415  # heavy, rarely needed

    with _catch_panics(UsageError):
        reason = LLMatcher.validate_grammar(text, limits=_limits())
    if reason and not reason.startswith("WARNING"):
        raise UsageError(f"the answer's grammar or schema cannot be used: {_in_one_line(reason)}")


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return a grammar for JSON that follows a schema."""
    return f"start: {json_rule(schema)}"


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the JSON grammar of a schema as a rule of a larger grammar.

    Whitespace is bounded, since a model may otherwise emit blanks forever.
    """
    options = {"whitespace_pattern": _BLANKS, **schema.get("x-guidance", {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def load_tokenizer(folder: Path) -> None:
    """Load a model's tokenizer before there is a grammar; a bad one fails the requests with one."""
    if (folder / "tokenizer.json").is_file() and (stop_ids := read_stop_ids(folder)):
        with contextlib.suppress(UsageError):
            _tokenizer(folder, tuple(sorted(stop_ids)))


class Grammar:
    """A grammar, and the position of an answer in it."""

    def __init__(self, matcher: Any, tokenizer: Any, stop_id: int) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._size = int(tokenizer.vocab_size)
        self.stop_id = stop_id
        """A token that ends the answer."""

    @classmethod
    def start(cls, text: str, folder: Path, stop_ids: Iterable[int]) -> Self:
        """Create the state at the beginning of an answer; compiled grammars are cached.

        Args:
            text: the grammar (`messages.LogitsOptions.grammar`).
            folder: the model folder, for its tokenizer.
            stop_ids: the tokens that may end the answer where the grammar allows an end.

        Raises:
            UsageError: the grammar cannot be used with this model.
        """
        stops = tuple(sorted(stop_ids))
        compiled, tokenizer = _compile(text, folder, stops)
        return cls(compiled.deep_copy(), tokenizer, stops[0])

    def copy(self) -> "Grammar":
        """Return a copy at the same position, for trying another continuation."""
        return Grammar(self._matcher.deep_copy(), self._tokenizer, self.stop_id)

    @property
    def is_accepting(self) -> bool:
        """True if the answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def characters(self) -> dict[str, int]:
        """The tokens of single ASCII characters."""
        return _list_characters(self._tokenizer)

    def advance(self, token: int) -> bool:
        """Consume a token; return False, unchanged, if it is not allowed here.

        Raises:
            ProtocolError: the grammar exceeds a limit here (so do the other methods).
        """
        with _catch_panics(ProtocolError):
            taken: int = self._matcher.try_consume_tokens([token])
        self._check()
        return taken == 1

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens are allowed in sequence; the state does not change."""
        # The library permanently fails on an unknown token.
        in_vocabulary = next((i for i, t in enumerate(tokens) if t >= self._size), len(tokens))
        with _catch_panics(ProtocolError):
            count = int(self._matcher.validate_tokens(list(tokens[:in_vocabulary])))
        self._check()
        return count

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        if count and not self._matcher.rollback(count):
            raise ProtocolError(f"the grammar cannot go back by {count} tokens")

    def compute_mask(self) -> AllowedMask:
        """Return [vocabulary] True for tokens that may come next."""
        with _catch_panics(ProtocolError):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _in_one_line(self._matcher.get_error())
            raise ProtocolError(
                f"the answer's grammar or schema costs too much ({reason}); simplify it"
            )


@lru_cache(maxsize=16)
def _compile(text: str, folder: Path, stop_ids: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the matcher at the beginning of an answer, and the tokenizer."""
    from llguidance import LLMatcher  # noqa: PLC0415  # heavy, rarely needed

    tokenizer = _tokenizer(folder, stop_ids)
    with _catch_panics(UsageError):
        matcher = LLMatcher(tokenizer, text, limits=_limits())
    if matcher.is_error():
        raise UsageError(f"the grammar cannot be used: {_in_one_line(matcher.get_error())}")
    return matcher, tokenizer


@cache
def _limits() -> Any:
    """llguidance's limits: symbols, the work to build the lexer (50,000 a ms), its states (1-2
    kB each), and the work for one mask (fuel: 14,000 a ms, items: 20,000 a ms).
    """
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
    # The library raises ValueError, or any other error caused by a broken file.
    except Exception as error:
        raise UsageError(f"grammars cannot be used with this tokenizer: {error}") from error


@lru_cache(maxsize=4)
def _list_characters(tokenizer: Any) -> dict[str, int]:
    spelt = {chr(code): tokenizer.tokenize_str(chr(code)) for code in range(33, 127)}
    return {character: ids[0] for character, ids in spelt.items() if len(ids) == 1}


@contextlib.contextmanager
def _catch_panics(kind: type[UsageError | ProtocolError]) -> Iterator[None]:
    """Convert panics of the library, which are not an `Exception`, to ordinary errors."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"the answer's grammar or schema breaks its library: {error}") from error


def _in_one_line(reason: str) -> str:
    return " ".join(reason.split())[:300]
