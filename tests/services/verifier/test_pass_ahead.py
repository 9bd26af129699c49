"""Shared passes of plain sequences that begin before their tokens are read: the same tokens."""

import itertools
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from protocol.messages import (
    CloseSequence,
    Extend,
    Failed,
    LogitsOptions,
    OpenSequence,
    Revoke,
    Sampling,
    VerificationOutcome,
    Verify,
)
from services.engine.batch import Batch
from services.engine.slot_table import SlotTable
from services.kernels.register import KERNELS
from services.runtime.work_queue import WorkQueue
from tests.services.kernels.cuda.host import attend_gathered
from tests.support.reference import SAMPLINGS, plain, tiny_verifier
from tests.support.tiny_models import SLOTTED

PROMPTS = {1: [11, 200, 5], 2: [7, 8, 9, 10, 33], 3: [90, 4], 4: [11, 200, 6, 1]}
GREEDY = Sampling()


class Crowd:
    """Sequences at a verifier that runs ahead, served in turns as the service's loop does."""

    def __init__(self, family: str = "llama", *, table: bool = False) -> None:
        self.verifier = tiny_verifier(family)
        self.verifier.scheduler.pipelines = True
        runner = self.runner = self.verifier.scheduler.runner
        runner.table = SlotTable(attend_gathered) if table else None
        self.ahead: list[int] = []
        """Of each pass that began ahead: how many sequences it has."""
        run = runner.run

        def count(batch: Batch) -> Any:
            self.ahead += [len(batch.parts)] if batch.ahead and len(batch.parts) > 1 else []
            return run(batch)

        runner.run = count  # type: ignore[method-assign]
        self.queue = WorkQueue(self.verifier)
        self.family = family
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.samplings: dict[int, Sampling] = {}
        self.running: dict[int, int] = {}
        """The round of the message whose outcomes come, by sequence."""
        self.passes: list[tuple[float, int]] = []
        """Time and sequences of the pass of each outcome."""

    def open(
        self, number: int, sampling: Sampling = GREEDY, prompt: list[int] | None = None
    ) -> None:
        prompt = prompt or PROMPTS[number]
        self.prompts[number], self.samplings[number] = prompt, sampling
        self.tokens[number] = list(prompt)
        self.queue.add(OpenSequence(sequence=number, tokens=prompt[:-1], sampling=sampling))

    def ask(
        self, number: int, *draft: int, granted: int = 0, stop_ids: tuple[int, ...] = ()
    ) -> None:
        tokens = self.tokens[number]
        self.running[number] = len(tokens)
        asked = Verify(
            sequence=number,
            round=len(tokens),
            position=len(tokens) - 1,
            nodes=[tokens[-1], *draft],
            granted=granted,
            stop_ids=list(stop_ids),
        )
        self.queue.add(asked)

    def close(self, number: int) -> None:
        self.running.pop(number, None)
        self.queue.add(CloseSequence(sequence=number))

    def step(self) -> None:
        """One step of whoever is next."""
        job = self.queue.next()
        self.queue.rotate(job)
        if job.answers is None:
            job.answers = self.verifier.handle(job.message)
        try:
            answer = next(job.answers)
        except StopIteration:
            self.queue.finish(job)
            return
        assert not isinstance(answer, Failed)
        if isinstance(answer, VerificationOutcome):
            self.tokens[answer.sequence].append(answer.bonus)
            self.passes.append((answer.verify_ms, answer.sequences))
            if not answer.goes_on:
                del self.running[answer.sequence]

    def settle(self) -> None:
        while self.queue:
            self.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.queue:
                self.step()

    def answer(self, number: int) -> list[int]:
        return self.tokens[number][len(self.prompts[number]) :]

    def check(self, numbers: tuple[int, ...] = (1, 2, 3)) -> None:
        """All tokens are those of plain decoding alone."""
        for number in numbers:
            found, prompt = self.answer(number), tuple(self.prompts[number])
            right = plain(self.family, prompt, len(found), self.samplings[number])
            assert right == found


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("family", SLOTTED)
def test_each_has_the_tokens_that_it_has_alone(family: str, *, table: bool) -> None:
    """After the first pass all begin ahead, until the grants have come to an end."""
    crowd = Crowd(family, table=table and family in ("llama", "qwen3", "moe"))
    for number in (1, 2, 3):
        crowd.open(number)
    crowd.settle()
    for number in (1, 2, 3):
        crowd.ask(number, granted=11)
    crowd.settle()
    assert [len(crowd.answer(number)) for number in (1, 2, 3)] == [12] * 3
    if crowd.verifier.target.shares_passes and crowd.verifier.target.states.way == "slots":
        assert crowd.ahead == [3] * 11
    else:
        assert crowd.ahead == []
    crowd.check()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_under_every_way_of_choosing(sampling: Sampling) -> None:
    """As on a GPU, where choices are made on the device, beside one that is greedy."""
    with patch("services.verifier.acceptance.kernels", lambda: KERNELS["cuda"]):
        crowd = Crowd()
        crowd.open(1, sampling)
        crowd.open(2)
        crowd.open(3, sampling)
        crowd.settle()
        for number in (1, 2, 3):
            crowd.ask(number, granted=11)
        crowd.settle()
    assert crowd.ahead == [3] * 11
    crowd.check()


def test_a_choice_of_the_host_begins_nothing() -> None:
    crowd = Crowd()
    crowd.open(1)
    shaped = LogitsOptions(repetition_penalty=1.7, answer_from=len(PROMPTS[2]))
    crowd.open(2, Sampling(logits_options=shaped))
    crowd.settle()
    crowd.ask(1, granted=5)
    crowd.ask(2, granted=5)
    crowd.settle()
    assert crowd.ahead == []
    assert [len(crowd.answer(number)) for number in (1, 2)] == [6, 6]
    crowd.check((1,))


@pytest.mark.parametrize("steps", range(1, 14, 3))
def test_who_comes_is_waited_for(steps: int) -> None:
    """It joins the next pass that has not begun, and then all begin ahead again."""
    crowd = Crowd()
    for number in (1, 2, 3):
        crowd.open(number)
    crowd.settle()
    crowd.ask(1, granted=11)
    crowd.ask(2, granted=11)
    crowd.steps(steps)
    crowd.ask(3, granted=11)
    crowd.settle()
    for number in (1, 2, 3):
        assert len(crowd.answer(number)) == 12
    assert crowd.ahead.count(3) >= 5
    together = [sequences for _, sequences in crowd.passes].index(3)
    assert together <= 7
    assert crowd.passes[together + 3 * 8 - 1][1] == 3
    crowd.check()


@pytest.mark.parametrize("steps", range(7, 20, 3))
def test_who_goes_stops_nobody(steps: int) -> None:
    """One is closed while its next tokens are in the making, as after a cancel; another comes."""
    crowd = Crowd(table=True)
    for number in (1, 2, 3):
        crowd.open(number)
    crowd.settle()
    for number in (1, 2, 3):
        crowd.ask(number, granted=11)
    crowd.steps(steps)
    crowd.close(2)
    crowd.steps(9)
    crowd.open(4)
    crowd.settle()
    crowd.ask(4, granted=11)
    crowd.settle()
    assert [len(crowd.answer(number)) for number in (1, 3, 4)] == [12] * 3
    assert 2 in crowd.ahead
    crowd.check((1, 2, 3, 4))


def test_a_stop_token_ends_one_of_them() -> None:
    """The others go on; what was in the making for it is nothing."""
    right = plain("llama", tuple(PROMPTS[2]), 12, GREEDY)
    stop = next(token for token in right[3:] if token not in right[:3])
    crowd = Crowd()
    for number in (1, 2, 3):
        crowd.open(number)
    crowd.settle()
    crowd.ask(1, granted=11)
    crowd.ask(2, granted=11, stop_ids=(stop,))
    crowd.ask(3, granted=11)
    crowd.settle()
    assert crowd.answer(2) == right[: right.index(stop) + 1]
    assert [len(crowd.answer(number)) for number in (1, 3)] == [12, 12]
    crowd.check()
    crowd.ask(2, granted=3)  # it may be asked for all the same
    crowd.settle()
    crowd.check()


def test_a_draft_beside_them_begins_nothing() -> None:
    """A pass with a draft in it is followed by one that is asked for."""
    right = plain("llama", tuple(PROMPTS[1]), 4, GREEDY)
    crowd = Crowd()
    crowd.open(1)
    crowd.open(2)
    crowd.settle()
    crowd.ask(1, right[0], 7)
    crowd.ask(2, granted=1)
    while crowd.queue:
        crowd.step()
        if len(crowd.tokens[1]) == 4 and crowd.tokens[1][-1] != right[0]:
            crowd.tokens[1].insert(-1, right[0])  # the accepted draft token
    assert crowd.ahead == []
    crowd.check((1, 2))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_in_between(seed: int) -> None:
    """Sequences come and go, are extended, revoked, asked with drafts: always plain's tokens."""
    random = Random(seed)  # noqa: S311  # no secret depends on it
    crowd = Crowd(table=bool(seed % 2))
    numbers = itertools.count(1)
    is_open: list[int] = []
    for _ in range(60):
        crowd.steps(random.randrange(12))
        number = random.choice(is_open) if is_open else 0
        match random.choice(("open", "ask", "ask", "close", "revoke", "extend")):
            case "open" if len(is_open) < 5:
                number = next(numbers)
                prompt = [random.randrange(1, 90) for _ in range(random.randrange(2, 9))]
                crowd.open(number, prompt=prompt)
                is_open.append(number)
            case "ask":
                for number in is_open:
                    if number not in crowd.running:
                        crowd.ask(number, granted=random.randrange(12))
            case "close" if number and random.random() < 0.3:
                is_open.remove(number)
                crowd.close(number)
            case "revoke" if number in crowd.running:
                crowd.queue.add(Revoke(sequence=number, round=crowd.running[number]))
            case "extend" if number in crowd.running:
                more = Extend(sequence=number, round=crowd.running[number], granted=3)
                crowd.queue.add(more)
    crowd.settle()
    assert len(crowd.passes) > 50
    assert len(crowd.ahead) > 5
    crowd.check(tuple(crowd.tokens))
    assert not any(one.passes for one in crowd.verifier._sequences.values())
