"""Generate texts of the target itself, many at a time.

A row starts with given tokens. If the target is to invent the prompt, these are the chat template's
tokens up to the user's words; sampling continues through the user's turn, the template's tokens for
the turn's end follow, and then the answer (the method of "magpie"). All rows are at one position,
so longer given prompts are simply fed while other rows already sample. The tokens stay on the
device until the batch is complete.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from protocol.messages import Tokens
from services.distill.batch_cache import BatchStore
from services.distill.data import ANSWER, GIVEN, PADDING, USER, Integers
from services.mlx.launching import launch
from services.mlx.loader import windows_of

_SHORTEST_ANSWER = 16
"""Minimum answer of every row, even when time is short."""
_LOOK_EVERY = 32
"""Steps between two checks whether rows are finished: each waits for the device."""


class ChatFormat(NamedTuple):
    """The chat format of a model."""

    turn: Tokens
    """Tokens from the end of the user's words to the start of the answer; empty: no chat."""
    stop_ids: Tokens
    user_tokens: int
    """Longest invented prompt."""


@dataclass(frozen=True)
class Rows:
    """Texts to generate."""

    given: list[Tokens]
    """The initial tokens of each row; at least one."""
    invents: bool
    """True if the rows continue with the user's words, otherwise with the answer."""
    temperatures: list[float]
    """Temperature of each row's answer."""
    length: int
    """Tokens of a complete row."""
    seed: int


class _State(NamedTuple):
    """State of every row; all [rows]."""

    token: mx.array
    phase: mx.array
    """0 in the user's words, i after i tokens of the turn, then answering, then done."""


class _Machine:
    """Maps a row's logits to its next token; pure, on the device."""

    def __init__(self, rows: Rows, chat: ChatFormat) -> None:
        count = len(rows.given)
        given = np.full((count, rows.length), -1, np.int32)
        for row, tokens in enumerate(rows.given):
            given[row, : len(tokens)] = tokens[: rows.length]
        self.given = given
        self._given = mx.array(given)
        self.answering = max(1, len(chat.turn))
        self.done = self.answering + 1
        self._turn = mx.array(chat.turn or [0], dtype=mx.int32)
        self._stops = mx.array(chat.stop_ids or [-1], dtype=mx.int32)
        self._temperatures = mx.array(rows.temperatures, dtype=mx.float32)
        shortest = min(map(len, rows.given))
        self._user_ends = shortest + chat.user_tokens
        prompts_end = max(map(len, rows.given))
        if rows.invents:
            prompts_end += chat.user_tokens + len(chat.turn)
        self.all_answer_from = prompts_end + _SHORTEST_ANSWER
        """The first position at which every row has some of its answer."""
        first = 0 if rows.invents else self.answering
        self.phase = mx.full((count,), first, dtype=mx.int32)

    def advance(
        self, logits: mx.array, phase: mx.array, position: int, key: mx.array
    ) -> tuple[_State, mx.array]:
        """Return the tokens at `position`, the new phases, and the tokens' kinds."""
        temperature = mx.where(phase == 0, 1.0, self._temperatures)
        noise = mx.random.gumbel(logits.shape, key=key)
        scores = logits.astype(mx.float32) + temperature[:, None] * noise
        sampled = mx.argmax(scores, axis=-1).astype(mx.int32)
        given = self._given[:, position]
        is_given = given >= 0
        answering, inventing = phase == self.answering, phase == 0
        stops = mx.any(sampled[:, None] == self._stops[None], axis=-1)
        overlong = mx.array(position >= self._user_ends)
        user_ends = inventing & (stops | (sampled == self._turn[0]) | overlong)
        in_turn = (phase > 0) & (phase < self.answering)
        turned = self._turn[mx.minimum(phase, self._turn.size - 1)]
        is_done = phase == self.done
        token = mx.where(user_ends, self._turn[0], mx.where(in_turn, turned, sampled))
        token = mx.where(is_given, given, mx.where(is_done, 0, token))
        kind = mx.where(answering, ANSWER, mx.where(is_done, PADDING, USER))
        kind = mx.where(is_given | user_ends | in_turn, GIVEN, kind)
        moved = mx.where(user_ends | in_turn, phase + 1, phase)
        moved = mx.where(answering & stops, self.done, moved)
        return _State(token, mx.where(is_given, phase, moved)), kind.astype(mx.int32)


def generate(
    model: Any,
    vocabulary: int,
    rows: Rows,
    chat: ChatFormat,
    stopping: Callable[[], bool],
    *,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[Integers, Integers] | None:
    """Complete the rows: return their tokens and kinds, both [rows, length], or None if stopped.

    Args:
        model: an mlx-lm model.
        vocabulary: tokens that exist; a padded head has columns without tokens.
        stopping: polled; if it returns True, the batch is abandoned.
        enough: polled; if it returns True, the rows end where they are, once all answer.
    """
    machine = _Machine(rows, chat)
    store = BatchStore(windows_of(model))
    common = _common(rows.given)
    tokens = [mx.array(machine.given[:, i]) for i in range(common)]
    kinds = [mx.full((len(rows.given),), GIVEN, dtype=mx.int32)] * common
    fed, phase = mx.stack(tokens, axis=1), machine.phase
    for position in range(common, rows.length):
        store.advance(fed.shape[1])
        logits = model(fed, cache=store.caches)[:, -1, :vocabulary]
        key = mx.random.key(rows.seed * rows.length + position)
        state, kind = machine.advance(logits, phase, position, key)
        launch([*state, kind, *store.state])
        tokens.append(state.token)
        kinds.append(kind)
        fed, phase = state.token[:, None], state.phase
        if position % _LOOK_EVERY == 0:
            if stopping():
                return None
            is_cut = position >= machine.all_answer_from and enough()
            if is_cut or bool(mx.all(phase == machine.done).item()):
                break
    return _collect(tokens, rows.length), _collect(kinds, rows.length)


def _common(given: list[Tokens]) -> int:
    """Return how many positions are given in every row, so that they are fed at once."""
    return min(map(len, given))


def _collect(columns: list[mx.array], length: int) -> Integers:
    """Return [rows, length], padded with zeros."""
    filled = np.array(mx.stack(columns, axis=1)).astype(np.int32)
    return np.pad(filled, ((0, 0), (0, length - filled.shape[1])))
