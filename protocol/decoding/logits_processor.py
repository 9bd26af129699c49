"""What a request does to logits before a token is drawn: bias, penalties, grammar.

All are functions of the tokens before a position, so target and drafter apply them alike,
position by position along a chain or a branch, and speculation changes no answer. In this
order, as mlx-lm does: the bias is added; the repetition penalty divides positive logits and
multiplies negative ones of every token of prompt and answer; the presence penalty is taken
once, and the frequency penalty once per occurrence, from the tokens of the answer; what the
grammar forbids becomes minus infinity.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from protocol.decoding.closing import find_end
from protocol.decoding.grammar import AllowedMask, Grammar
from protocol.decoding.sampler import Floats, Ids
from protocol.errors import ProtocolError
from protocol.messages import LogitsOptions, Tokens

_SPARE_TOKENS = 4
"""A token may open something, as a comma does a name and a value, which takes others to close."""
_EARLIER_TOKENS = 32
_LEAST_ROOM = 8
"""Tokens of an answer besides what its grammar requires."""
_LONGEST_END = 512
_DECISIVE = 100.0
"""A bias of this size bans a token, or all the others: OpenAI's largest."""


class BannedTokens:
    """The tokens that a request's bias rules out; none without options."""

    def __init__(self, options: LogitsOptions | None) -> None:
        biases = options.logit_bias if options is not None else ()
        self._banned = frozenset(token for token, bias in biases if bias <= -_DECISIVE)
        self._only = frozenset(token for token, bias in biases if bias >= _DECISIVE)

    def count_allowed(self, tokens: Tokens) -> int:
        """How many of these tokens stand before the first that is ruled out."""
        return next(self._iter_banned(tokens), len(tokens))

    def _iter_banned(self, tokens: Tokens) -> Iterator[int]:
        for index, token in enumerate(tokens):
            if token in self._banned or (self._only and token not in self._only):
                yield index


class LogitsProcessor:
    """The state of one sequence after some of its tokens, at one model.

    Args:
        options: what the request wants.
        folder: the model folder, for a grammar's tokenizer.
        tokens: the sequence so far.
        head_ids: what the columns of a trimmed head stand for; None: column i is token i.
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
        """Tokens at the end that the grammar does not allow: nothing after them is shaped by it."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Tokens) -> None:
        """These tokens follow."""
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
        """A copy after the first `length` tokens, to try a continuation with."""
        copy = object.__new__(LogitsProcessor)
        copy.__dict__.update(self.__dict__)
        copy._tokens = list(self._tokens)  # a copy of our own
        copy._seen, copy._said = self._seen.copy(), self._said.copy()
        copy._grammar = self._grammar.copy() if self._grammar else None
        copy.rewind(length)
        return copy

    def count_allowed(self, sure: Tokens, draft: Tokens) -> int:
        """How many draft tokens may follow: no bias bans them, and the grammar allows them.

        Penalties rule nothing out.

        Args:
            sure: what stands between the tokens so far and the draft, ruled out or not.
            draft: the tokens to look at; nothing is moved along them.
        """
        count = self._bans.count_allowed(draft)
        if not self._grammar or self._stray:
            return count
        answer = max(0, self._options.answer_from - len(self._tokens))
        looked_at = [*sure, *draft[:count]][answer:]
        return max(0, answer + self._grammar.count_allowed(looked_at) - len(sure))

    def process(self, row: Floats) -> Floats:
        """[vocabulary or head] logits after these tokens, as the next token is drawn from."""
        row = np.array(row, dtype=np.float32)
        known = self._biased < row.size
        np.add.at(row, self._biased[known], self._biases[known])
        if self._penalises:
            self._penalise(row)
        if self._grammar and not self._stray:
            self._forbid(row, self._list_allowed(self._grammar))
        return row

    def _list_allowed(self, grammar: Grammar) -> AllowedMask:
        """[vocabulary] what may come next; near the answer's limit, what ends it in time."""
        allowed = grammar.compute_mask()
        left = self._options.answer_until - len(self._tokens)
        if 0 < left <= self._measure_window():
            end = find_end(grammar, left)
            if end is not None and left <= len(end) + _SPARE_TOKENS:
                allowed = np.zeros_like(allowed)
                allowed[end[0]] = True
        return allowed

    def _measure_window(self) -> int:
        """How long before its limit the end of the answer is looked for; 0: never.

        A limit that leaves room for nothing but what the grammar requires is not kept by force.
        """
        if self._window is None:
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
        columns, said = [], []
        for token, count in self._seen.items():
            column = self._column(token)
            if count > 0 and column is not None and column < row.size:
                columns.append(column)
                said.append(self._said[token])
        at, counts = np.array(columns, dtype=np.int64), np.array(said, dtype=np.float32)
        logits = row[at]
        factor = np.float32(s.repetition_penalty)
        logits = np.where(logits > 0, logits / factor, logits * factor)
        logits -= np.float32(s.presence_penalty) * (counts > 0)
        row[at] = logits - np.float32(s.frequency_penalty) * counts

    def _forbid(self, row: Floats, allowed: AllowedMask) -> None:
        if self._head_ids is None:
            forbidden = np.ones(row.size, dtype=np.bool_)
            known = min(row.size, allowed.size)
            forbidden[:known] = ~allowed[:known]
        else:
            forbidden = ~allowed[self._head_ids]
        if not forbidden.all():
            row[forbidden] = -np.inf
        elif self._head_ids is None:
            raise ProtocolError("the grammar leaves no token of this model's vocabulary")
        # A trimmed head may know none of the allowed tokens; then any draft is as bad.


def process_rows(processor: LogitsProcessor | None, tokens: Tokens, rows: Floats) -> Floats:
    """Move the processor along tokens; returns the logits after each of them, shaped.

    Args:
        processor: after the tokens before these; None changes nothing.
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
