"""Logits processors of a request: bias, penalties, grammar.

All are functions of the tokens before a position, so target and drafter apply them alike, position
by position along a chain or a branch, and speculation changes no answer. The order is mlx-lm's: the
bias is added; the repetition penalty divides positive logits and multiplies negative ones of every
token of prompt and answer; the presence penalty is subtracted once, and the frequency penalty once
per occurrence, from the tokens of the answer; tokens that the grammar forbids become minus
infinity.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from protocol.decoding.grammar import AllowedMask, Grammar
from protocol.decoding.sampler import Floats, Ids
from protocol.errors import ProtocolError
from protocol.messages import LogitsOptions, Tokens

_SPARE_TOKENS = 4
"""A token may open something, as a comma does a name and a value, which needs other tokens to
close.
"""
_EARLIER_TOKENS = 32
_LEAST_ROOM = 8
"""Tokens of an answer beyond those that its grammar requires."""
_LONGEST_END = 512
_DECISIVE = 100.0
"""A bias of this size bans a token, or all others: OpenAI's maximum."""


class BannedTokens:
    """The tokens that a request's bias bans; none without options."""

    def __init__(self, options: LogitsOptions | None) -> None:
        biases = options.logit_bias if options is not None else ()
        self._banned = frozenset(token for token, bias in biases if bias <= -_DECISIVE)
        self._only = frozenset(token for token, bias in biases if bias >= _DECISIVE)

    def count_allowed(self, tokens: Tokens) -> int:
        """Return how many of these tokens precede the first banned one."""
        return next(self._iter_banned(tokens), len(tokens))

    def _iter_banned(self, tokens: Tokens) -> Iterator[int]:
        for index, token in enumerate(tokens):
            if token in self._banned or (self._only and token not in self._only):
                yield index


class LogitsProcessor:
    """The state of one sequence after some of its tokens, at one model.

    Args:
        options: the request's options.
        folder: the model folder, for a grammar's tokenizer.
        tokens: the sequence so far.
        head_ids: token ids of the columns of a trimmed head; None: column i is token i.
    """

    def __init__(
        self, options: LogitsOptions, folder: Path, tokens: Tokens, head_ids: Ids | None = None
    ) -> None:
        self._options = options
        self._bans = BannedTokens(options)
        self._head_ids = head_ids
        self._columns = {} if head_ids is None else {int(t): c for c, t in enumerate(head_ids)}
        places = ((self._column(token), bias) for token, bias in options.logit_bias)
        biases = [(column, bias) for column, bias in places if column is not None]
        self._biased = np.array([column for column, _ in biases], dtype=np.int64)
        self._biases = np.array([bias for _, bias in biases], dtype=np.float32)
        self._grammar: Grammar | None = None
        if options.grammar:
            self._grammar = Grammar.start(options.grammar, folder, options.stop_ids)
        self._folder = folder
        self._window: int | None = None
        self._tokens: Tokens = []
        self._seen: Counter[int] = Counter()
        self._said: Counter[int] = Counter()
        self._stray = 0
        """Trailing tokens that the grammar does not allow: it does not constrain what follows."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Tokens) -> None:
        """Append tokens."""
        for token in tokens:
            answer = len(self._tokens) >= self._options.answer_from
            self._tokens.append(token)
            self._seen[token] += 1
            if not answer:
                continue
            self._said[token] += 1
            if self._stray or (self._grammar and not self._grammar.advance(token)):
                self._stray += 1

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens only."""
        dropped = self._tokens[length:]
        answered = dropped[max(0, self._options.answer_from - length) :]
        del self._tokens[length:]
        self._seen.subtract(dropped)
        self._said.subtract(answered)
        if self._grammar:
            self._grammar.rollback(max(0, len(answered) - self._stray))
        self._stray = max(0, self._stray - len(answered))

    def branch(self, length: int) -> "LogitsProcessor":
        """Return a copy after the first `length` tokens, for trying a continuation."""
        copy = object.__new__(LogitsProcessor)
        copy.__dict__.update(self.__dict__)
        copy._tokens = list(self._tokens)  # a separate copy
        copy._seen, copy._said = self._seen.copy(), self._said.copy()
        copy._grammar = self._grammar.copy() if self._grammar else None
        copy.rewind(length)
        return copy

    def count_allowed(self, sure: Tokens, draft: Tokens) -> int:
        """Return how many draft tokens may follow: not banned by bias, and allowed by the grammar.

        Penalties ban nothing.

        Args:
            sure: tokens between those so far and the draft, banned or not.
            draft: the tokens to check; the state does not advance.
        """
        count = self._bans.count_allowed(draft)
        if not self._grammar or self._stray:
            return count
        answer = max(0, self._options.answer_from - len(self._tokens))
        looked_at = [*sure, *draft[:count]][answer:]
        return max(0, answer + self._grammar.count_allowed(looked_at) - len(sure))

    def process(self, row: Floats) -> Floats:
        """Return the [vocabulary or head] logits from which the next token is sampled."""
        row = np.array(row, dtype=np.float32)
        within = self._biased < row.size
        np.add.at(row, self._biased[within], self._biases[within])
        if self._penalises:
            self._penalise(row)
        if self._grammar and not self._stray:
            self._forbid(row, self._list_allowed(self._grammar))
        return row

    def _list_allowed(self, grammar: Grammar) -> AllowedMask:
        """Return [vocabulary] the allowed tokens; near the limit, those that end in time."""
        from protocol.decoding.closing import find_end  # noqa: PLC0415

        allowed = grammar.compute_mask()
        left = self._options.answer_until - len(self._tokens)
        if 0 < left <= self._measure_window():
            end = find_end(grammar, left)
            if end is not None and left <= len(end) + _SPARE_TOKENS:
                allowed = np.zeros_like(allowed)
                allowed[end[0]] = True
        return allowed

    def _measure_window(self) -> int:
        """Return how long before its limit to look for the answer's end; 0: never.

        A limit that leaves no room beyond what the grammar requires is not enforced.
        """
        if self._window is None:
            from protocol.decoding.closing import find_end  # noqa: PLC0415

            shape = self._options
            start = Grammar.start(shape.grammar, self._folder, shape.stop_ids)
            end = find_end(start, _LONGEST_END)
            room = shape.answer_until - shape.answer_from
            has_room = end is not None and room >= len(end) + _LEAST_ROOM
            self._window = len(end or ()) + _EARLIER_TOKENS if has_room else 0
        return self._window

    @property
    def _penalises(self) -> bool:
        s = self._options
        return s.repetition_penalty != 1.0 or bool(s.presence_penalty or s.frequency_penalty)

    def _column(self, token: int) -> int | None:
        return token if self._head_ids is None else self._columns.get(token)

    def _penalise(self, row: Floats) -> None:
        s = self._options
        columns, answered = [], []
        for token, count in self._seen.items():
            column = self._column(token)
            if count > 0 and column is not None and column < row.size:
                columns.append(column)
                answered.append(self._said[token])
        at, counts = np.array(columns, dtype=np.int64), np.array(answered, dtype=np.float32)
        logits = row[at]
        factor = np.float32(s.repetition_penalty)
        logits = np.where(logits > 0, logits / factor, logits * factor)
        logits -= np.float32(s.presence_penalty) * (counts > 0)
        row[at] = logits - np.float32(s.frequency_penalty) * counts

    def _forbid(self, row: Floats, allowed: AllowedMask) -> None:
        if self._head_ids is None:
            forbidden = np.ones(row.size, dtype=np.bool_)
            width = min(row.size, allowed.size)
            forbidden[:width] = ~allowed[:width]
        else:
            forbidden = ~allowed[self._head_ids]
        if not forbidden.all():
            row[forbidden] = -np.inf
        elif self._head_ids is None:
            raise ProtocolError("the grammar leaves no token of this model's vocabulary")
        # A trimmed head may have none of the allowed tokens; then any draft is equally bad.


def process_rows(processor: LogitsProcessor | None, tokens: Tokens, rows: Floats) -> Floats:
    """Advance the processor along tokens; return the processed logits after each of them.

    Args:
        processor: the state before these tokens; None changes nothing.
        tokens: the next tokens.
        rows: [tokens, vocabulary or head].
    """
    if processor is None:
        return rows
    shaped = np.empty(rows.shape, dtype=np.float32)
    for index, token in enumerate(tokens):
        processor.extend([token])
        shaped[index] = processor.process(rows[index])
    return shaped
