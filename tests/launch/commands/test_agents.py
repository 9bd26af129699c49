"""`ssd claude` and `ssd codex`: the program runs with what it needs to know of the server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.gateway.scripted import ScriptedClient, serving
from tests.support.stack import leftovers
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

ASK_CLAUDE = """#!{python}
import json, os, sys, urllib.request
asked = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 3,
         "messages": [{{"role": "user", "content": sys.argv[1]}}]}}
headers = {{"Content-Type": "application/json",
           "Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
print(json.load(urllib.request.urlopen(request))["usage"]["output_tokens"])
sys.exit(7)
"""


def ssd(*arguments: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", *arguments]
    variables = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", **environment}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=variables
    )


def write_program(folder: Path, name: str, source: str) -> None:
    program = folder / name
    program.write_text(source.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)


def test_a_server_is_started_for_the_program(tmp_path: Path, run_dir: Path) -> None:
    """It answers the program, ends with it, and its exit code is the program's."""
    write_program(tmp_path, "claude", ASK_CLAUDE)
    target = write_tiny_model(tmp_path / "target", "llama", seed=1)
    done = ssd(
        "claude", "--model", str(target), "--draft-backend", "ngram", "--port", "1", "--", "hello",
        path=tmp_path, SSD_RUN_DIR=str(run_dir),
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (7, "3"), done.stderr
    assert leftovers(run_dir) == []


def test_a_server_that_is_running_is_used(tmp_path: Path) -> None:
    """What answers at the address is found by its model."""
    write_program(tmp_path, "claude", ASK_CLAUDE)
    stub = ScriptedClient("abc", size=1)
    with serving(stub) as url:
        port = url.rpartition(":")[2]
        done = ssd("claude", "--port", port, "--", "hello", path=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (7, "3"), done.stderr
    assert f"using the server at {url}" in done.stderr
    assert stub.requests[0].messages[0].content == "hello"


def test_what_a_program_needs_is_printed(tmp_path: Path) -> None:
    """As lines for a shell; nothing is started."""
    done = ssd("claude", "--print-env", "--port", "1", path=tmp_path, SSD_API_KEY="a key")
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:1\n" in done.stdout
    assert "export ANTHROPIC_AUTH_TOKEN='a key'\n" in done.stdout
    assert "export CLAUDE_STREAM_IDLE_TIMEOUT_MS=3600000\n" in done.stdout
    done = ssd("codex", "--print-env", "--port", "1", path=tmp_path)
    assert "export SSD_API_KEY=none\n" in done.stdout
    assert """'model_providers.ssd.base_url="http://127.0.0.1:1/v1"'""" in done.stdout
    assert """'model_providers.ssd.wire_api="responses"'""" in done.stdout


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    """In a sentence that says what else can be done."""
    done = ssd("codex", path=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2
    assert "'codex' is not installed" in done.stderr
    assert "--print-env" in done.stderr
