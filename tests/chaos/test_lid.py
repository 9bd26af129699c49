"""All processes of a stack stand still for longer than any of its limits, and go on."""

import contextlib
import http.client
import json
from pathlib import Path

import pytest

from launch.bench.http_load import DONE, events
from launch.settings.settings import StackSettings
from tests.chaos.lid import close_lid
from tests.support.stack import DEADLINE_S, RunningStack, running
from tests.support.tiny_models import write_endless_model

pytestmark = pytest.mark.processes

LIMIT_S = 2.0
CLOSED_S = 5.0
BODY = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 200}


def pids_of(stack: RunningStack) -> dict[str, int]:
    return {process.role: process.pid for process in stack.supervisor.processes}


def stream(url: str, *, closes: bool) -> str:
    """An answer over HTTP; the lid is closed after its first event if it `closes`."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
    body, kind = json.dumps({**BODY, "stream": True}), {"Content-Type": "application/json"}
    text = ""
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", body, kind)
        for data in events(connection.getresponse()):
            if closes:
                close_lid(CLOSED_S)
                closes = False
            if data == DONE:
                return text
            event = json.loads(data)
            assert "error" not in event
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    raise AssertionError("the stream was cut off")


def test_a_lid_that_is_closed_costs_nothing(tmp_path: Path) -> None:
    """Answers in flight end with the same tokens, and no process is replaced."""
    target = write_endless_model(tmp_path / "target", "llama")
    settings = StackSettings(
        model=str(target),
        draft_model=str(target),
        hang_timeout_s=LIMIT_S,
        verify_timeout_s=LIMIT_S,
        http=True,
        port=0,
    )
    with running(settings) as stack:
        assert stack.supervisor.listener is not None
        url = stack.supervisor.listener.url
        plain = stack.answer("hello", mode="ar", max_tokens=100).tokens
        text = stream(url, closes=False)
        before = pids_of(stack)
        todo = [CLOSED_S]

        def close(count: int) -> None:
            if count >= 5 and todo:
                close_lid(todo.pop())

        assert stack.answer("hello", max_tokens=100, num_draft_tokens=3, when=close).tokens == plain
        assert stream(url, closes=True) == text
        assert pids_of(stack) == before
