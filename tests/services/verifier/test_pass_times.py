"""What is measured of a target before it is used, and that nothing of that stays."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch.settings.settings import StackSettings
from protocol.errors import OutOfMemory
from protocol.messages import (
    CloseSequence,
    FromService,
    OpenSequence,
    Prefilled,
    Sampling,
    VerificationOutcome,
    Verify,
)
from services.kv.prefix_cache import PrefixCache
from services.mlx.loader import load
from services.runtime.preparation import run_all
from services.runtime.sequence_table import TRIAL_SEQUENCE
from services.verifier import pass_times
from services.verifier.pass_times import measure_passes
from services.verifier.verifier import Verifier, Work
from tests.services.verifier.test_not_a_number import poison
from tests.support.reference import tiny_folder
from tests.support.stack import running
from tests.support.tiny_models import write_tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("drafter_idle", [False, True])
def test_passes_that_the_target_can_verify_are_measured(
    family: str, monkeypatch: pytest.MonkeyPatch, *, drafter_idle: bool
) -> None:
    """A single token in any case; chains as far as it takes them."""
    monkeypatch.setattr("services.verifier.pass_times._BUDGET_S", 60.0)
    monkeypatch.setattr("services.verifier.pass_times._DEAR", 1e6)
    verifier = Verifier(load(tiny_folder(family)), 512)
    times = run_all(measure_passes(verifier, drafter_idle=drafter_idle))
    most = verifier.max_draft_tokens + 1
    assert set(times.chains) == {rows for rows in pass_times._CHAINS if rows <= most}
    assert all(ms > 0.0 for ms in times.chains.values())
    assert not verifier._sequences


def test_passes_are_timed_between_those_of_requests() -> None:
    """Work on a prompt or a verification ends first, as it may share its passes."""
    verifier = Verifier(load(tiny_folder("llama")), 4)
    steps, prompt = measure_passes(verifier, drafter_idle=True), list(range(1, 13))
    opening = verifier.handle(OpenSequence(sequence=1, tokens=prompt, sampling=Sampling()))
    next(opening)
    next(steps)
    assert not verifier.has_open(TRIAL_SEQUENCE)
    deque(opening, maxlen=0)
    next(steps)
    assert verifier.has_open(TRIAL_SEQUENCE)
    times = run_all(steps)
    assert times.chains
    assert verifier.has_open(1)


def test_a_token_is_timed_as_plain_decoding_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind others of its run, as its pass may begin before theirs has ended."""
    verifier = Verifier(load(tiny_folder("llama")), 4)
    handle, rounds = verifier.handle, list[int]()

    def slow_at_first(message: Work) -> Iterator[FromService | None]:
        for answer in handle(message):
            if isinstance(answer, VerificationOutcome):
                is_asked = isinstance(message, Verify) and answer.round == message.round
                rounds.append(answer.round)
                yield replace(answer, verify_ms=9.0 if is_asked else 4.0)
            else:
                yield answer

    monkeypatch.setattr(verifier, "handle", slow_at_first)
    times = run_all(measure_passes(verifier, drafter_idle=True))
    assert times.chains[1] == 4.0
    assert set(times.chains.values()) == {4.0, 9.0}
    assert rounds == list(range(1, len(rounds) + 1))


def test_a_slow_target_is_measured_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is over no further pass begins."""
    monkeypatch.setattr("services.verifier.pass_times._BUDGET_S", 0.0)
    times = run_all(measure_passes(Verifier(load(tiny_folder("llama")), 512), drafter_idle=True))
    assert list(times.chains) == [1]


def test_a_broken_target_is_left_to_its_requests(tmp_path: Path) -> None:
    """Its logits are NaN: it starts all the same."""
    verifier = Verifier(load(poison(write_tiny_model(tmp_path / "m", "llama"))), 512)
    assert not run_all(measure_passes(verifier, drafter_idle=True)).chains
    assert not verifier._sequences


def test_a_target_that_has_no_room_is_left_to_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the short text fits."""
    verifier = Verifier(load(tiny_folder("llama")), 512)

    def refuse(*_: object) -> None:
        raise OutOfMemory("there is none left")

    monkeypatch.setattr(verifier, "_open", refuse)
    assert not run_all(measure_passes(verifier, drafter_idle=True)).chains


def test_a_request_may_come_between_two_passes() -> None:
    """It finds nothing of the text that passes are timed with, and these go on after it."""
    prompts = PrefixCache(4, 1 << 30)
    verifier = Verifier(load(tiny_folder("llama")), 512, prompts)
    steps, request = measure_passes(verifier, drafter_idle=True), [*pass_times._PROMPT, 5]
    for number in range(1, 5):
        next(steps)
        opening = OpenSequence(sequence=number, tokens=request, sampling=Sampling())
        [answer] = [one for one in verifier.handle(opening) if one is not None]
        assert isinstance(answer, Prefilled)
        assert answer.cached == (0 if number == 1 else len(request))
        assert list(verifier._sequences) == [number]
        list(verifier.handle(CloseSequence(sequence=number)))
    assert run_all(steps).chains
    assert [held.tokens for held in prompts.kept] == [request]
    assert not verifier._sequences


@pytest.mark.processes
@pytest.mark.usefixtures("run_dir")
def test_timing_them_keeps_nothing_of_the_text(tmp_path: Path) -> None:
    """A prompt that begins like the text that passes were timed with is computed."""
    folders = [str(write_tiny_model(tmp_path / name, "llama", seed=1)) for name in "td"]
    settings = StackSettings(model=folders[0], draft_model=folders[1])
    with running(settings) as stack:
        answer = stack.answer("", tokens=[*pass_times._PROMPT, 5], max_tokens=1)
    assert answer.cached_tokens == 0
