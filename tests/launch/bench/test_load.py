"""`ssd load` against a stack: all requests are answered, or what went wrong is raised."""

from collections.abc import Iterator
from typing import Any

import pytest

from launch.bench import load
from orchestrator.telemetry.recorder import Recorder
from protocol.messages import Finished, Generate, Text


class Answering:
    """A client that answers with as many tokens as the prompt has, unless it is told to fail."""

    def __init__(self, address: str) -> None:
        self._fails = address == "broken"

    def number(self) -> int:
        return 1

    def generate(self, request: Generate) -> Iterator[Any]:
        if self._fails and len(request.tokens) == 3:
            raise ValueError("not a message")
        tokens = request.tokens
        yield Text(request=1, tokens=tokens, origins=["target"] * len(tokens), pieces=[])
        told = Recorder(0.0).summarise()
        yield Finished(request=1, reason="length", prompt_tokens=len(tokens), statistics=told)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "Client", Answering)


def requests() -> list[Generate]:
    return [Generate(request=1, tokens=[5] * count) for count in (1, 2, 3, 4)]


def test_every_request_is_answered_once() -> None:
    found = load.load_stack("whole", requests(), 2)
    assert {one.prompt: one.tokens for one in found.answers} == {0: 1, 1: 2, 2: 3, 3: 4}
    assert found.tok_s == pytest.approx(10 / found.seconds)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_client_that_fails_fails_the_measurement(streams: int) -> None:
    """Whatever it fails with: a speed of fewer answers than were asked for is none."""
    with pytest.raises(ValueError, match="not a message"):
        load.load_stack("broken", requests(), streams)
