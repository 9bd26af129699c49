"""While a long prompt is computed, a line says how far that has come; the answer replaces it."""

import io
from collections.abc import Callable, Generator
from typing import Any, cast

import pytest
from rich.console import Console

from launch.terminal import console
from launch.terminal.generate import stream_with_progress
from protocol.messages import Finished, Generate, Progress, Text
from tests.services.gateway.scripted import finish


class SlowClient:
    """An orchestrator that computes a prompt in two pieces, and then answers with a word."""

    def __init__(self) -> None:
        self.on_progress: Callable[[Progress], None]
        self.asked: list[Generate] = []

    def generate(self, request: Generate) -> Generator[Text | Finished]:
        self.asked.append(request)
        if request.progress:
            for computed in (512, 1024):
                self.on_progress(Progress(request=1, prompt_tokens=1500, computed=computed))
        yield Text(request=1, tokens=[5], origins=["target"], pieces=["word"])
        yield finish("stop")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_is_gone_before_the_answer(
    monkeypatch: pytest.MonkeyPatch, *, terminal: bool
) -> None:
    """On a terminal; where nobody would see it, it is not even asked for."""
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=terminal, width=80)
    monkeypatch.setattr(console, "stderr", lambda: shown)
    client = SlowClient()
    events = stream_with_progress(cast("Any", client), Generate(request=1, text="x"))
    first = next(events)
    assert isinstance(first, Text)
    before = screen.getvalue()
    assert len(list(events)) == 1
    assert screen.getvalue() == before, "nothing is drawn into the answer"
    assert client.asked[0].progress is terminal
    assert ("reading the prompt: 1024 of 1500 tokens" in before) is terminal
    assert before.endswith("\x1b[1A\x1b[2K") is terminal
