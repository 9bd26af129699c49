"""Trials, timings and traces after a service's Hello, in short steps between requests.

A stage is a generator that pauses after each step, of a few tenths of a second at most. It goes on
only while no sequence is open, so what it changes takes effect between two answers and never within
one. Until then a model computes as it was loaded. A stage that changes no computation also goes on
between two rounds of a service that is never idle.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from protocol.decoding.grammar import load_tokenizer
from protocol.errors import BackendLost, NotNumbers
from protocol.messages import PreparationState

_log = logging.getLogger(__name__)

T = TypeVar("T")
Steps = Generator[None, None, T]


def run_all(steps: Steps[T]) -> T:
    """Run these steps without a pause; return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Stage(NamedTuple):
    """A part of the preparation."""

    name: str
    """For users."""
    begin: Callable[[], Steps[None]]
    between_rounds: bool = False
    """True if it may go on while sequences are open: computations stay as they are."""


def tokenizer_stage(folder: Path) -> Stage:
    """Return the stage that loads a model's tokenizer for grammars, which cannot be divided."""

    def load() -> Steps[None]:
        load_tokenizer(folder)
        yield

    return Stage("grammars", load, between_rounds=True)


class Preparer:
    """Runs the stages of a service, one after the other."""

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._stages = stages
        self._done = 0
        self._steps: Steps[None] | None = None
        self._stage_s = 0.0

    @property
    def state(self) -> PreparationState:
        """How far it is."""
        stage = "" if self.is_complete else self._stages[self._done].name
        return PreparationState(done=self._done, total=len(self._stages), stage=stage)

    @property
    def is_complete(self) -> bool:
        """True if nothing is left."""
        return self._done >= len(self._stages)

    @property
    def goes_on_between_rounds(self) -> bool:
        """True if the present stage may go on while sequences are open."""
        return not self.is_complete and self._stages[self._done].between_rounds

    def step(self) -> bool:
        """Run a step of the present stage; return True if the stage has ended.

        A stage that fails leaves the service as it was.
        """
        stage, began = self._stages[self._done], time.perf_counter()
        self._steps = self._steps or stage.begin()
        try:
            next(self._steps)
        except StopIteration:
            _log.info("prepared %s in %.2f s of steps", stage.name, self._stage_s)
        except BackendLost:
            raise
        # The service works without it.
        except Exception:  # noqa: BLE001
            _log.exception("preparing %s failed", stage.name)
        else:
            self._stage_s += time.perf_counter() - began
            return False
        self._done, self._steps, self._stage_s = self._done + 1, None, 0.0
        return True


@contextlib.contextmanager
def unless_broken() -> Iterator[None]:
    """Leave out warm-up passes of a model whose logits are NaN; its requests report the error."""
    try:
        yield
    except NotNumbers as error:
        _log.warning("not warmed up: %s", error)
