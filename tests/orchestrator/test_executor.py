"""The books of a request: done before it answers anything else, whoever asks."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.executor import Executor
from orchestrator.requests.crash_journal import CrashJournal
from orchestrator.sequence.actions import Action, Finish
from protocol.messages import VerificationOutcome

OUTCOME = VerificationOutcome(sequence=1, round=1, accepted=0, bonus=5, verify_ms=5.0, idle_ms=0.1)


class Sequence:
    """Says what is done to it."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.tokens, self._log = number, [1], log
        self.recorder = SimpleNamespace(verifying_since=0.0)

    def decide(self, outcome: VerificationOutcome, now: float) -> list[Action]:
        self._log.append(f"decided {self.number}")
        return []

    def record(self, now: float) -> list[Action]:
        self._log.append(f"booked {self.number}")
        return []


@pytest.fixture
def log() -> list[str]:
    return []


def make_executor(registry: Any) -> Executor:
    nobody: Any = SimpleNamespace(start=lambda *_: None)
    return Executor(
        nobody,
        nobody,
        registry=registry,
        timeouts=nobody,
        journal=CrashJournal(None, 2),
        on_end=lambda _: None,
    )


@pytest.fixture
def executor() -> Executor:
    return make_executor(SimpleNamespace())


def request(number: int, log: list[str]) -> Any:
    sequence = Sequence(number, log)
    return SimpleNamespace(sequence=sequence, digest=b"", frames={}, is_over=False, ids={})


def test_books_wait_for_outcomes_that_come_together(executor: Executor, log: list[str]) -> None:
    for number in (1, 2, 3):
        executor.commit(request(number, log), OUTCOME, 0.0)
    executor.catch_up()
    steps = [f"{step} {number}" for step in ("decided", "booked") for number in (1, 2, 3)]
    assert log == steps
    executor.catch_up()
    assert log == steps


def test_a_second_outcome_finds_the_books_of_the_first_done(
    executor: Executor, log: list[str]
) -> None:
    first, other = request(1, log), request(2, log)
    for each in (first, other, first):
        executor.commit(each, OUTCOME, 0.0)
    assert log == ["decided 1", "decided 2", "booked 1", "booked 2", "decided 1"]


def test_an_event_finds_all_books_done(executor: Executor, log: list[str]) -> None:
    """Also one that the books of another request lead to."""
    first, other, third = (request(number, log) for number in (1, 2, 3))

    def happen() -> list[Action]:
        log.append("event")
        return []

    def record(now: float) -> list[Action]:
        log.append("booked 1")
        executor.run(third, happen)
        return []

    first.sequence.record = record
    for each in (first, other):
        executor.commit(each, OUTCOME, 0.0)
    executor.run(third, happen)
    assert log == ["decided 1", "decided 2", "booked 1", "booked 2", "event", "event"]


def test_who_is_over_has_no_books(executor: Executor, log: list[str]) -> None:
    failing = request(1, log)
    executor.commit(failing, OUTCOME, 0.0)
    failing.is_over = True
    executor.catch_up()
    assert log == ["decided 1"]


def test_only_a_drafter_that_should_be_there_is_missed(log: list[str]) -> None:
    """Without one configured, an answer says nothing of its absence; nor who has seen it go."""
    for lookup_only, has_had_drafter, missed in (
        (True, False, 0),
        (True, True, 3),
        (False, False, 3),
    ):
        end = request(1, log)
        end.has_had_drafter, end.last_messages = has_had_drafter, lambda *_: []
        fallbacks = end.sequence.recorder.fallbacks = Counter(no_drafter=3, lookup=2)
        executor = make_executor(SimpleNamespace(lookup_only=lookup_only))
        executor.run(end, lambda: [Finish("stop", "")])
        assert (fallbacks["no_drafter"], fallbacks["lookup"]) == (missed, 2)
