"""How prompts are cut, and that nobody waits for a whole one."""

import pytest

from protocol.messages import OpenSequence, Prefilled, Sampling, VerificationOutcome, Verify
from services.agenda import Agenda
from services.model import load
from services.prefill import Pacer
from services.verification import Verifier
from tests.reference import plain, tiny_folder


def test_alone_a_prompt_goes_in_the_largest_pieces() -> None:
    """Nobody waits, so nobody is stalled."""
    pacer = Pacer(512)
    pacer.took(100, 1.0)
    assert pacer.size(alone=True) == 512


@pytest.mark.parametrize(
    ("tokens", "seconds", "expected"),
    [(0, 0.0, 32), (100, 1.0, 25), (100, 10.0, 16), (10_000, 1.0, 512), (64, 0.0, 32)],
)
def test_in_company_a_piece_takes_a_quarter_of_a_second(
    tokens: int, seconds: float, expected: int
) -> None:
    """As measured with the last piece; never none, never more than was set; at first a guess."""
    pacer = Pacer(512)
    pacer.took(tokens, seconds)
    assert pacer.size(alone=False) == expected
    assert Pacer(8).size(alone=False) == 8


def test_a_long_prompt_does_not_stall_the_others() -> None:
    """Between any two pieces of a new request's prompt a verification of another is answered."""
    verifier = Verifier(load(tiny_folder("llama")), 512)
    agenda = Agenda(verifier)
    answers: list[object] = []

    def step() -> None:
        job = agenda.next()
        if job.answers is None:
            job.answers = verifier.handle(job.message)
        agenda.took_turn(job)
        try:
            answer = next(job.answers)
        except StopIteration:
            agenda.done(job)
            return
        if isinstance(job.message, OpenSequence) or answer is not None:
            answers.append(answer)

    prompt = (11, 200, 7)
    agenda.add(OpenSequence(sequence=1, tokens=list(prompt[:-1]), sampling=Sampling()))
    while agenda:
        step()
    answers.clear()
    long = OpenSequence(sequence=2, tokens=[5] * 200, sampling=Sampling())
    agenda.add(long)
    committed = list(prompt)
    while not any(isinstance(answer, Prefilled) for answer in answers):
        if not any(line == 1 for line in agenda._lines):
            agenda.add(
                Verify(sequence=1, round=1, position=len(committed) - 1, chain=[committed[-1]])
            )
        before = len(answers)
        step()
        for answer in answers[before:]:
            if isinstance(answer, VerificationOutcome):
                committed.append(answer.bonus)
    kinds = "".join("v" if isinstance(answer, VerificationOutcome) else "p" for answer in answers)
    assert kinds.count("p") >= 2
    assert "ppp" not in kinds
    assert kinds.count("v") >= kinds.count("p") - 2
    assert committed[3:] == plain("llama", prompt, len(committed) - 3, Sampling())
