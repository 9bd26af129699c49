"""Each request that asked for an answer leaves one line: its route, figures and end, no text."""

import json
import logging
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.commands.launch import print_requests
from launch.stack.run_dir import RunDir
from protocol.process.logs import JsonFormatter
from services.gateway.request_log import describe_answer
from tests.services.gateway.scripted import ScriptedClient, finish, serving
from tests.support.stack import DEADLINE_S, eventually

BODY = {"messages": [{"role": "user", "content": "a secret question"}]}


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of the reply."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310  # ours
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:  # noqa: S310  # ours
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines of requests so far, as they are written."""
    records = [r for r in caplog.records if r.name == "services.gateway.request_log"]
    return [json.loads(JsonFormatter("gateway").format(record)) for record in records]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
)
def test_an_answer_leaves_a_line(
    caplog: pytest.LogCaptureFixture, path: str, *, stream: bool
) -> None:
    """The same for every API, with the id that the client reads; ids differ."""
    caplog.set_level(logging.INFO)
    client = ScriptedClient("a secret answer", "another one")
    body = {**BODY, "prompt": "a secret question", "input": "a secret question", "max_tokens": 9}
    wanted = {
        "/v1/completions": ("prompt", "max_tokens"),
        "/v1/responses": ("input",),
    }.get(path, ("messages", "max_tokens"))
    with serving(client) as url:
        for _ in range(2):
            sent = {**{name: body[name] for name in wanted}, "stream": stream}
            status, reply = post(f"{url}{path}", sent)
            assert status == 200, reply
    first, second = lines(caplog)
    assert first["route"] == f"POST {path}"
    assert first["message"].startswith("20 prompt tokens (8 cached), 5 tokens at 1.0 tok/s, ended")
    assert "ended by stop" in first["message"]
    assert second["id"] in reply
    assert first["id"] != second["id"]
    assert first["request"] != second["request"]
    assert "secret" not in json.dumps([first, second])


def test_what_is_refused_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """With its status and reason; what only looks at the server leaves none."""
    caplog.set_level(logging.INFO)
    with serving(ScriptedClient()) as url:
        assert post(f"{url}/v1/chat/completions", {**BODY, "temperature": 9})[0] == 400
        assert post(f"{url}/v1/chat/completions", {**BODY, "model": "x"})[0] == 404
        with urllib.request.urlopen(f"{url}/recent", timeout=DEADLINE_S) as reply:  # noqa: S310
            assert reply.status == 200
    first, second = lines(caplog)
    assert first["level"] == second["level"] == "warning"
    assert first["message"].startswith("error 400: temperature must be at most 2")
    assert second["message"].startswith("error 404: there is no model 'x' here")


def test_a_client_that_leaves_is_written_down(caplog: pytest.LogCaptureFixture) -> None:
    """Once, however it left."""
    caplog.set_level(logging.INFO)
    client = ScriptedClient("word ", endless=True)
    with serving(client) as url:
        body = json.dumps({**BODY, "stream": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:  # noqa: S310
            reply.readline()
        eventually(lambda: bool(lines(caplog)), "the line is written")
    [line] = lines(caplog)
    assert line["message"].startswith("cancelled by the client")


def test_the_figures_are_worded() -> None:
    """Nothing is said of drafts where there were none."""
    assert describe_answer(finish("length", cached_tokens=0), 3) == (
        "20 prompt tokens, 3 tokens at 1.0 tok/s, ended by length"
    )
    finished = finish("stop", cached_tokens=0)
    unmeasured = msgspec.structs.replace(finished.statistics, tok_s=0.0)
    finished = msgspec.structs.replace(finished, statistics=unmeasured)
    assert describe_answer(finished, 1) == "20 prompt tokens, 1 tokens, ended by stop"


def test_serve_prints_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of requests, each once, as they come; nothing else of the log."""

    class Folder(RunDir):
        def log(self, role: str) -> Path:
            return tmp_path / f"{role}.log"

    print_new = print_requests(Folder("x"))
    print_new()
    other = json.dumps({"time": 1.0, "level": "info", "message": "other"})
    line = json.dumps({"time": 2.0, "route": "POST /v1/messages", "message": "5 tokens"})
    (tmp_path / "gateway.log").write_text(f"{other}\n{line}\n{line[:9]}")
    print_new()
    with (tmp_path / "gateway.log").open("a") as log:
        log.write(line[9:] + "\n")
    print_new()
    print_new()
    printed = capsys.readouterr().err.splitlines()
    assert [text.split("  ", 1)[1] for text in printed] == ["POST /v1/messages  5 tokens"] * 2
