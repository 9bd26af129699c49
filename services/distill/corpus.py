"""The generation phase: the target's texts, batch by batch, until there are enough."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import UsageError
from protocol.jobs.distill import DistillNote, DistillProgress, DistillSettings, TokenPrompt
from protocol.messages import Tokens
from services.distill.data import ANSWER, USER, RowInfo, ShardInfo, Shards
from services.distill.generation import ChatFormat, Rows, generate
from services.distill.run_control import RunControl

_ROOM = 16
"""Minimum room for an answer, in tokens."""
_LOOK_STEPS = 32
_SHARE = 1 / 3
"""Default share of a run's time for its texts."""
_LARGEST_SHARE = 2 / 3
"""Share of a run's time for its texts if their number was requested."""


def chat_of(settings: DistillSettings) -> ChatFormat:
    """Return the chat format in the settings."""
    return ChatFormat(settings.turn, settings.stop_ids, settings.user_tokens)


def read_prompts(settings: DistillSettings) -> list[TokenPrompt]:
    """Return the given prompts that leave room for an answer."""
    try:
        lines = Path(settings.prompts).read_bytes().splitlines()
        prompts = [msgspec.json.decode(line, type=TokenPrompt) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"the prompts {settings.prompts!r} cannot be read: {error}") from error
    fitting = [p for p in prompts if 0 < len(p.tokens) <= settings.length - _ROOM]
    if not fitting:
        raise UsageError(f"no prompt leaves room for an answer; raise length={settings.length}")
    return fitting


class Corpus:
    """Fills a run's shards."""

    def __init__(self, settings: DistillSettings, shards: Shards, batch: int) -> None:
        self._settings = settings
        self._shards = shards
        self._batch = batch
        self._prompts = read_prompts(settings) if settings.prompts else []
        infos = shards.infos()
        self._number = len(infos)
        self._rows = sum(len(info.rows) for info in infos)
        self._tokens = sum(info.generated for info in infos)
        self._seconds = sum(info.seconds for info in infos)

    def fill(self, target: Any, vocabulary: int, control: RunControl) -> bool:
        """Generate missing texts; False if the session stopped it."""
        last_s = 0.0
        while self._budget_share() < 1 and not self._is_late(control, last_s / 2):
            if control.stopping:
                return False
            rows, infos = self._next_rows()
            if not infos:
                control.say(DistillNote("every prompt was answered at every temperature"))
                break
            started = time.monotonic()
            steps = iter(range(_LOOK_STEPS, 1 << 30, _LOOK_STEPS))
            look = partial(self._report_progress, control, len(infos), steps, started)
            enough = partial(self._is_enough, control, started)
            made = generate(target, vocabulary, rows, chat_of(self._settings), look, enough=enough)
            if made is None:
                return False
            tokens, kinds = made
            generated = int(((kinds == ANSWER) | (kinds == USER)).sum())
            last_s = time.monotonic() - started
            self._shards.add(self._number, tokens, kinds, ShardInfo(infos, generated, last_s))
            self._number += 1
            self._rows += len(infos)
            self._tokens += generated
            self._seconds += last_s
        return True

    def _is_late(self, control: RunControl, next_s: float) -> bool:
        """Return True if the texts' time is over, or will be `next_s` seconds from now."""
        if not self._number:
            return False
        settings = self._settings
        if settings.data_tokens:
            return control.run_left_s - next_s < (1 - _LARGEST_SHARE) * 60 * settings.minutes
        return self._budget_share(seconds=next_s) > 1

    def _is_enough(self, control: RunControl, started: float) -> bool:
        """Return True if the current batch must end for lack of time."""
        settings = self._settings
        if settings.data_tokens:
            return control.run_left_s < (1 - _LARGEST_SHARE) * 60 * settings.minutes
        return self._budget_share(seconds=time.monotonic() - started) >= 1

    def _budget_share(self, tokens: int = 0, seconds: float = 0.0) -> float:
        """Return the spent share of the budget, with these tokens and seconds added."""
        settings = self._settings
        if settings.data_tokens:
            return (self._tokens + tokens) / settings.data_tokens
        minutes = settings.data_minutes or settings.minutes * _SHARE
        return (self._seconds + seconds) / max(60 * minutes, 1e-9)

    def _report_progress(
        self, control: RunControl, rows: int, steps: Iterator[int], started: float
    ) -> bool:
        tokens = rows * next(steps)
        seconds = time.monotonic() - started
        spent = min(1.0, self._budget_share(tokens, seconds))
        passed = self._seconds + seconds
        control.say(
            DistillProgress(
                phase="generating",
                done=spent,
                seconds_left=passed * (1 - spent) / max(spent, 1e-9),
                tok_s=tokens / max(seconds, 1e-9),
            )
        )
        return control.stopping

    def _next_rows(self) -> tuple[Rows, list[RowInfo]]:
        settings = self._settings
        numbers = range(self._rows, self._rows + self._batch)
        if self._prompts:
            total = len(self._prompts) * len(settings.temperatures)
            rows = [self._prompt_row(number) for number in numbers if number < total]
            infos, given = [info for info, _ in rows], [tokens for _, tokens in rows]
        else:
            turn = settings.temperatures
            infos = [RowInfo(number, turn[number % len(turn)]) for number in numbers]
            given = [settings.opening] * self._batch
        return Rows(
            given,
            invents=not self._prompts and bool(settings.turn),
            temperatures=[info.temperature for info in infos],
            length=settings.length,
            seed=(settings.seed << 20) + self._number,
        ), infos

    def _prompt_row(self, number: int) -> tuple[RowInfo, Tokens]:
        """Return row `number`: all prompts in turn, then again, each at its next temperature."""
        passed, place = divmod(number, len(self._prompts))
        turn = self._settings.temperatures
        prompt = self._prompts[place]
        # Each prompt has as many numbers as there are temperatures: see `data.divided`.
        info = RowInfo(place * len(turn), turn[(place + passed) % len(turn)], prompt.category)
        return info, prompt.tokens
