"""Grammars are checked where they can do no harm, before any model sees them."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.text import grammar_check, grammar_cost
from orchestrator.text.grammar_check import GrammarChecker
from orchestrator.text.worker_process import WorkerProcess
from protocol.decoding import grammar
from protocol.decoding.grammar import Grammar, json_grammar, load_tokenizer
from protocol.decoding.stop_tokens import read_stop_ids
from protocol.errors import ProtocolError, RuntimeFailure, ServiceLost, UsageError
from tests.support.stack import DEADLINE_S, eventually
from tests.support.tiny_models import write_tiny_model

PERSON = json_grammar({"type": "object", "properties": {"age": {"type": "integer"}}})
ENDLESS = json_grammar({"type": "integer", "multipleOf": 999_983})
"""Its automaton has a state for each remainder, and takes minutes."""
AMBIGUOUS = json_grammar({"type": "string", "pattern": "^" + "a?" * 200 + "a" * 200 + "$"})


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a grammar have its processor's time, however long a busy machine takes to give it."""
    monkeypatch.setattr(grammar_check, "_LONGEST_S", DEADLINE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "t", "llama", seed=1)


@pytest.fixture(scope="module")
def checker(folder: Path) -> Iterator[GrammarChecker]:
    with GrammarChecker(str(folder), deadline_s=1.5) as checker:
        yield checker


@pytest.mark.parametrize("grammar", [PERSON, "start: /[a-z]{1,40}/", json_grammar({})])
def test_a_common_grammar_is_taken(checker: GrammarChecker, grammar: str) -> None:
    """Nothing is said about it, however often it is asked for."""
    checker.check(grammar)
    checker.check(grammar)


def test_a_grammar_that_never_compiles_is_refused(checker: GrammarChecker) -> None:
    """At the deadline, which the error names; the next grammar finds a new process."""
    with pytest.raises(UsageError, match=r"takes more than 1\.5 s to compile; simplify"):
        checker.check(ENDLESS)
    checker.check(PERSON)
    process = checker._worker._process
    with pytest.raises(UsageError, match=r"takes more than 1\.5 s"):
        checker.check(ENDLESS)
    assert (
        checker._worker._process is process
    )  # it is remembered; else the process would be another one


def test_a_process_that_is_held_up_has_its_time(checker: GrammarChecker) -> None:
    """A busy machine does not make a grammar cost more: what counts is the processor's time."""
    checker.check('start: "not" "yet"')
    process = checker._worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    go_on = threading.Timer(0.5, os.kill, (process.pid, signal.SIGCONT))
    go_on.start()
    checker.check('start: "held" "up"')
    go_on.join()
    assert checker._worker._process is process


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (AMBIGUOUS, r"costs too much \(.*expressions"),
        ("start: /(", "cannot be used"),
        (json_grammar({"type": "nothing"}), "cannot be used"),
        ("start: A\nA: " + "x" * 200_000, "at most 131072 are taken"),
        ("start: A\nA: " + "é" * 100_000, "at most 131072 are taken"),
    ],
)
def test_what_cannot_be_used_is_said(checker: GrammarChecker, grammar: str, why: str) -> None:
    """In a sentence that a client can act on."""
    with pytest.raises(UsageError, match=why):
        checker.check(grammar)


def test_what_takes_the_models_too_long_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compile it among other work, and so within a shorter time than the check may take."""
    assert not grammar_cost.find_grammar_error(PERSON, folder)
    monkeypatch.setattr(grammar_cost, "MAX_COMPILE_S", 0.0)
    assert "s to compile; at most 0 s" in grammar_cost.find_grammar_error(PERSON, folder)


@pytest.mark.parametrize("depth", [16, 24])
def test_doubling_references_end(checker: GrammarChecker, depth: int) -> None:
    """Each level names the one below twice, and twice again inside: it is refused."""
    levels: dict[str, object] = {"a0": {"type": "object", "properties": {"z": {"type": "string"}}}}
    for level in range(1, depth):
        twice = [{"$ref": f"#/$defs/a{level - 1}"}] * 2
        levels[f"a{level}"] = {"allOf": twice, "properties": {f"p{level}": {"allOf": twice}}}
    schema = {"$defs": levels, "$ref": f"#/$defs/a{depth - 1}"}
    started = time.monotonic()
    with pytest.raises(UsageError, match="schema"):
        checker.check(json_grammar(schema))
    assert time.monotonic() - started < 60.0


def test_a_killed_process_is_replaced(checker: GrammarChecker) -> None:
    """Whoever ends it, the next grammar is checked."""
    checker.check("start: /x/")
    process = checker._worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    checker.check("start: /y/")
    assert checker._worker._process is not process


def _disturb(monkeypatch: pytest.MonkeyPatch, *signals: int) -> None:
    """Send these to a process as soon as it is asked, one to each attempt."""
    left = list(signals)
    exchange = WorkerProcess._exchange

    def strike(self: WorkerProcess, *arguments: Any) -> Any:
        assert self._process is not None
        if left:
            os.kill(self._process.pid, left.pop(0))
        return exchange(self, *arguments)

    monkeypatch.setattr(WorkerProcess, "_exchange", strike)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_lost_on_the_way_is_tried_again(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Killed or stopped at work: another one answers, and the grammar is not to blame."""
    _disturb(monkeypatch, number)
    checker.check(f'start: "once" "{number}"')
    _disturb(monkeypatch, number, number)
    grammar = f'start: "twice" "{number}"'
    with pytest.raises(ServiceLost, match="try again"):
        checker.check(grammar)
    assert checker.recall(grammar) is None
    checker.check(grammar)


def test_a_grammar_that_its_process_breaks_down_of_is_to_blame(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice by a signal that nobody sends: the request is wrong, and that is remembered."""
    _disturb(monkeypatch, signal.SIGSEGV, signal.SIGABRT)
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot be compiled"):
            checker.check('start: "a" "grammar" "of" "death"')


def test_the_process_ends_with_its_parent(folder: Path) -> None:
    """The pipes have ended."""
    checker = GrammarChecker(str(folder))
    checker.check(PERSON)
    process = checker._worker._process
    assert process is not None
    for end in checker._worker._ends:
        os.close(end)
    checker._worker._ends = []
    eventually(lambda: process.poll() is not None, "the process has ended")
    checker.close()


def test_closing_does_not_wait_for_a_grammar(folder: Path) -> None:
    """A process that checks one is ended, and whoever waits for it goes on."""
    checker = GrammarChecker(str(folder), deadline_s=DEADLINE_S)
    checker.check(PERSON)
    failed: list[Exception] = []

    def check_endless() -> None:
        try:
            checker.check(ENDLESS)
        except RuntimeFailure as error:
            failed.append(error)

    other = threading.Thread(target=check_endless)
    other.start()
    eventually(checker._worker._turn.locked, "the grammar is being checked")
    checker.close()
    other.join(DEADLINE_S / 2)
    assert [type(error) for error in failed] == [ServiceLost]


def test_without_a_tokenizer_a_grammar_is_read() -> None:
    """A gateway that has no model folder still refuses what is no grammar."""
    with GrammarChecker("") as checker:
        checker.check(PERSON)
        with pytest.raises(UsageError, match="cannot be used"):
            checker.check("start: /(")


def test_a_grammar_that_costs_too_much_later_ends_its_request(folder: Path) -> None:
    """A limit that is met in the middle of an answer is an error, not an answer without one."""
    grammar = Grammar.start(AMBIGUOUS, folder, [0])
    quote = int(grammar.compute_mask().argmax())
    with pytest.raises(ProtocolError, match="costs too much"):
        grammar.advance(quote)
    for refused in (grammar.compute_mask, lambda: grammar.count_allowed([quote])):
        with pytest.raises(ProtocolError, match="costs too much"):
            refused()


def test_answers_share_what_was_compiled(folder: Path) -> None:
    """Each starts at the beginning all the same."""
    first, second = (Grammar.start("start: /ab/", folder, [0]) for _ in range(2))
    letter = int(first.compute_mask().argmax())
    assert first.advance(letter)
    assert second.advance(letter)
    assert not first.advance(letter)


def test_a_tokenizer_is_loaded_once_before_the_first_grammar(tmp_path: Path) -> None:
    """Neither the first grammar nor the list of characters loads it again."""
    folder = write_tiny_model(tmp_path / "t", "llama", seed=1)
    load_tokenizer(folder)
    before = grammar._tokenizer.cache_info()
    started = Grammar.start(PERSON, folder, read_stop_ids(folder))
    assert started.characters
    after = grammar._tokenizer.cache_info()
    assert (after.misses, after.hits > before.hits) == (before.misses, True)


def test_the_process_starts_before_the_first_grammar(folder: Path) -> None:
    """Who prepares has the process that checks; after the end there is none."""
    checker = GrammarChecker(str(folder))
    checker.prepare()
    process = checker._worker._process
    assert process is not None
    checker.check(PERSON)
    assert checker._worker._process is process
    checker.close()
    checker.prepare()
    assert checker._worker._process is None


def test_a_process_that_is_ended_at_its_start_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; then the request may be tried later, and the grammar is not to blame."""
    start, ended = WorkerProcess._start, []

    def start_and_end(self: WorkerProcess) -> Any:
        channel = start(self)
        if len(ended) in (0, 2, 3):
            assert self._process is not None
            self._process.kill()
            self._process.wait()
        ended.append(channel)
        return channel

    monkeypatch.setattr(WorkerProcess, "_start", start_and_end)
    with GrammarChecker(str(folder)) as checker:
        checker.check(PERSON)
        checker._worker._end()
        with pytest.raises(ServiceLost, match="try again"):
            checker.check("start: /other/")
