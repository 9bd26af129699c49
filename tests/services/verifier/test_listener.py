"""What is prepared is read while the device computes: nothing waits for it afterwards."""

import time

import mlx.core as mx
import pytest

from protocol.messages import (
    OpenSequence,
    PreparedRound,
    Sampling,
    VerificationOutcome,
    Verify,
    VerifyAhead,
)
from protocol.transport.codec import encode
from services.batching.forward import ForwardPass
from services.mlx.loader import load
from services.verifier.listener import Listener
from services.verifier.verifier import Verifier
from tests.support.reference import plain, tiny_folder

PROMPT = (0, 2, 97, 41, 250, 33, 8, 141)
ROWS = 3


def pass_of(rows: int, seconds: float) -> ForwardPass:
    """One that is over."""
    return ForwardPass(rows, 1, started=0.0, ended=seconds)


def waits(listener: Listener, by: ForwardPass, news: int = 0) -> list[float]:
    """How long it waits for something to come, which happens so many times."""
    asked: list[float] = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) <= news

    listener.wait = wait
    listener.listen_beside(by, mx.array([1]))
    return asked


def test_it_waits_while_the_device_is_certainly_at_work() -> None:
    """Not as long as the shortest pass of so many rows; others say nothing."""
    listener = Listener({})
    for rows, seconds in ((ROWS, 500.0), (ROWS, 100.0), (ROWS, 300.0), (ROWS + 1, 1.0)):
        listener.on_pass(pass_of(rows, seconds))
    [waited] = waits(listener, ForwardPass(ROWS, 1))
    assert 40.0 < waited < 100.0
    [waited] = waits(listener, ForwardPass(ROWS, 1, started=time.perf_counter() - 100.0))
    assert waited < 0.0


def test_it_does_not_wait_where_it_knows_nothing() -> None:
    """Of passes with so many rows."""
    listener = Listener({})
    listener.on_pass(pass_of(ROWS, 100.0))
    [waited] = waits(listener, ForwardPass(ROWS + 1, 1))
    assert waited < 0.0


def test_everything_that_comes_meanwhile_is_read() -> None:
    """And what has come before."""
    listener = Listener({})
    taken: list[None] = []
    listener.take = lambda: taken.append(None) or ()
    assert len(waits(listener, ForwardPass(ROWS, 1), news=3)) == 4
    assert len(taken) == 4


@pytest.mark.parametrize(("gpu", "idle"), [(True, False), (True, True), (False, False)])
def test_rounds_are_heard_of_before_a_pass_is_over(*, gpu: bool, idle: bool) -> None:
    """On a GPU, unless there is no drafter at work; and again afterwards."""
    verifier = Verifier(load(tiny_folder("llama")), 512)
    verifier.pipelines = gpu
    sampling = Sampling()
    list(verifier.handle(OpenSequence(sequence=1, tokens=list(PROMPT[:-1]), sampling=sampling)))
    [first] = plain("llama", PROMPT, 1, sampling)
    after = Verify(sequence=1, round=2, position=len(PROMPT), nodes=[first], drafter_idle=True)
    offer = VerifyAhead(sequence=1, round=1, rounds=[PreparedRound(0, first, 1, encode(after))])
    heard: list[bool] = []

    def take() -> list[VerifyAhead]:
        heard.append(verifier._last_pass.rows == 0)
        return [offer]

    verifier.listener.take = take
    asked = Verify(
        sequence=1, round=1, position=len(PROMPT) - 1, nodes=[PROMPT[-1]], drafter_idle=idle
    )
    found = [one for one in verifier.handle(asked) if isinstance(one, VerificationOutcome)]
    assert [one.began for one in found] == ([0] if idle else [1, 0])
    assert heard == ([] if idle else [True, False] if gpu else [False])
    assert set(verifier.listener._shortest_s) == {1}
