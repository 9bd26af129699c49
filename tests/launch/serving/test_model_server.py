"""Several models behind one server: real stacks that come, go, fail and are killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest

from launch.serving.model_server import ModelServer
from launch.serving.models_file import read_models
from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor, list_models
from launch.stack.run_dir import RunDir
from launch.stack.snapshot import StackObserver
from protocol.messages import ProcessStatus, Stack, StackRequest
from tests.support.stack import DEADLINE_S, eventually, gone, leftovers
from tests.support.tiny_models import write_endless_model, write_tiny_model

pytestmark = pytest.mark.processes

_ADDRESS = re.compile(r"API at (\S+)\s")
HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two models that differ, one that never ends, and a broken one."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "first", "llama")
    write_tiny_model(folder / "second", "qwen3", seed=7)
    write_endless_model(folder / "endless", "llama", seed=3)
    broken = write_tiny_model(folder / "broken", "llama")
    (broken / "model.safetensors").write_bytes(b"not weights")
    return folder


class Running:
    """A server, what it reported, and a client of it."""

    def __init__(self, server: ModelServer, lines: list[ProcessStatus]) -> None:
        self.server = server
        self.lines = lines
        self.openai = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )

    def say(self, model: str, **fields: Any) -> Any:
        fields = {"max_tokens": 12, "messages": HELLO, **fields}
        return self.openai.chat.completions.create(model=model, **fields)

    def states(self) -> dict[str, str]:
        return {card.id: card.to_dict()["state"] for card in self.openai.models.list()}

    def processes(self) -> list[ProcessStatus]:
        """Of all models, and the gateway."""
        answer = ask_supervisor(self.server.run_dir.path.name, StackRequest(), DEADLINE_S)
        assert isinstance(answer, Stack)
        return answer.processes

    def pids(self, prefix: str = "") -> list[int]:
        """Of the processes whose role begins like this."""
        return [p.pid for p in self.processes() if p.role.startswith(prefix)]

    def drafter(self, model: str) -> str:
        """The backend that drafts for a model."""
        drafters = (p.backend for p in self.processes() if p.role == f"{model} drafter")
        return next(drafters, "ngram")  # prompt lookup has no process


@contextlib.contextmanager
def serving(path: Path, **settings: Any) -> Iterator[Running]:
    full = StackSettings(http=True, port=0, models=str(path), **settings)
    lines: list[ProcessStatus] = []
    server = ModelServer(full, read_models(path, full), RunDir("many"), lines.append)
    try:
        server.start()
        running = Running(server, lines)
        with running.openai:
            yield running
    finally:
        server.stop()


def await_text(chunks: Any) -> None:
    """A stream begins before its model is loaded; text comes after that."""
    next(chunk for chunk in chunks if chunk.choices[0].delta.content)


def test_models_come_when_they_are_asked_for(models: Path, run_dir: Path) -> None:
    """Each answers with its own voice, and a broken one with a sentence; nothing is left over."""
    with serving(models) as running:
        eventually(
            lambda: sum(bool(one.memory_bytes) for one in list_models("many", DEADLINE_S)) == 3,
            "the sizes of local models are known",
        )
        assert set(running.states().values()) == {"unloaded"}
        with StackObserver("many") as observer:
            assert {one.state for one in observer.look().models} == {"unloaded"}
        first = running.say("first")
        second = running.say("second")
        assert (first.model, second.model) == ("first", "second")
        assert first.choices[0].message.content != second.choices[0].message.content
        with pytest.raises(openai.InternalServerError, match="cannot load the model") as caught:
            running.say("broken")
        assert caught.value.status_code == 503
        with (
            anthropic.Anthropic(
                base_url=running.server.url, api_key="none", max_retries=0, timeout=DEADLINE_S
            ) as other,
            pytest.raises(anthropic.InternalServerError, match="cannot load the model"),
        ):
            other.messages.create(model="broken", max_tokens=5, messages=HELLO)
        with pytest.raises(openai.NotFoundError, match="there is no model 'third'"):
            running.say("third")
        assert running.say("first").choices[0].message == first.choices[0].message
        states = running.states()
        pids = running.pids()
    assert states == {
        "broken": "failed", "endless": "unloaded", "first": "loaded", "second": "loaded"
    }  # fmt: skip
    assert gone(pids)
    assert leftovers(run_dir) == []


def test_one_models_death_is_not_the_others(models: Path, run_dir: Path) -> None:
    """SIGKILL to all processes of a model: the other's stream goes on, and it comes back."""
    with serving(models) as running:
        first = running.say("first").choices[0].message.content
        stream = running.say("endless", max_tokens=100_000, stream=True)
        chunks = iter(stream)
        for _ in range(3):
            next(chunks)
        for pid in running.pids("first"):
            os.kill(pid, signal.SIGKILL)
        for _ in range(20):
            assert next(chunks).choices
        assert running.say("first").choices[0].message.content == first
        assert next(chunks).choices
        stream.close()
        gateway = running.pids("gateway")[0]
        os.kill(gateway, signal.SIGKILL)
        eventually(lambda: running.pids("gateway") not in ([gateway], []), "a new gateway")
        assert running.say("first").choices[0].message.content == first
        eventually(
            lambda: all(one.answering == 0 for one in list_models("many", DEADLINE_S)),
            "what the dead gateway used is free",
        )


def test_the_idle_make_room_for_others(models: Path, run_dir: Path) -> None:
    """One model fits: a new one waits until the old one's answer is over, then takes its place."""
    file = models / "models.toml"
    file.write_text(
        "\n".join(
            f'[{name}]\nmodel = "{models / name}"\ndraft_backend = "ngram"'
            for name in ("first", "second", "endless")
        ),
        encoding="utf-8",
    )
    with serving(file, memory_bytes=400_000_000) as running:
        stream = running.say("endless", max_tokens=100_000, stream=True)
        await_text(stream)
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(running.say("first")))
        asking.start()
        eventually(
            lambda: any(one.waiting for one in list_models("many", DEADLINE_S)), "the second waits"
        )
        assert running.states()["endless"] == "loaded"
        assert next(iter(stream)).choices
        stream.close()
        asking.join(DEADLINE_S)
        assert answers
        assert running.states() == {
            "first": "loaded", "second": "unloaded", "endless": "unloaded"
        }  # fmt: skip
    with serving(file, idle_unload=0.2) as running:
        running.say("first")
        eventually(lambda: running.states()["first"] == "unloaded", "an idle model goes")


def test_requests_choose_a_drafter(models: Path, run_dir: Path) -> None:
    """One of those that the file names; the answer is the same with any."""
    file = models / "drafters.toml"
    file.write_text(
        f'[first]\nmodel = "{models / "first"}"\ndraft_backend = "ngram"\nkeep_loaded = true\n'
        f'[first.drafters]\nitself = {{ draft_model = "{models / "first"}" }}\n'
        'broken = { draft_model = "/nowhere" }\n',
        encoding="utf-8",
    )
    with serving(file) as running:
        eventually(lambda: running.states()["first"] == "loaded", "what is kept is loaded")
        plain = running.say("first", extra_body={"draft_model": None})
        looked_up = running.say("first")
        backends = [running.drafter("first")]
        drafted = running.say("first", extra_body={"draft_model": "itself"})
        backends.append(running.drafter("first"))
        again = running.say("first")
        backends.append(running.drafter("first"))
        with pytest.raises(openai.InternalServerError, match="the drafter 'broken'"):
            running.say("first", extra_body={"draft_model": "broken"})
        with pytest.raises(openai.NotFoundError, match="'other' is not running"):
            running.say("first", extra_body={"draft_model": "other"})
        last = running.say("first")
        backends.append(running.drafter("first"))
    texts = [a.choices[0].message.content for a in (plain, looked_up, drafted, again, last)]
    assert len(set(texts)) == 1
    assert backends == ["ngram", "mlx", "mlx", "mlx"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_end_leaves_nothing(
    models: Path, run_dir: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Ctrl-C while (most likely) a model loads and another answers, or SIGKILL to the server."""
    ssd = str(Path(sys.executable).with_name("ssd"))
    command = [ssd, "serve", "--models", str(models), "--port", "0"]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--name", "many"], stderr=output, start_new_session=True
        )
    try:
        said = tmp_path / "output"
        eventually(lambda: bool(_ADDRESS.search(said.read_text("utf-8"))), "the server is ready")
        url = _ADDRESS.findall(said.read_text("utf-8"))[-1]
        with openai.OpenAI(base_url=url, api_key="none", timeout=DEADLINE_S) as client:
            asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 100_000, "stream": True}
            stream = client.chat.completions.create(model="endless", **asked)
            await_text(stream)
            loading = threading.Thread(
                target=_ask_in_vain, args=(client, "first"), name="waits for a model"
            )
            loading.start()
            eventually(lambda: state_of("first") in {"loading", "loaded"}, "another one is loaded")
            children = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
            os.kill(process.pid, how)
            process.wait(DEADLINE_S)
            loading.join(DEADLINE_S)
        eventually(lambda: gone(children), "no process is left")
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    eventually(lambda: leftovers(run_dir) == [], "no file is left")


def state_of(model: str) -> str:
    """Of one of the server's models."""
    return next(one.state for one in list_models("many", DEADLINE_S) if one.name == model)


def _ask_in_vain(client: openai.OpenAI, model: str) -> None:
    with contextlib.suppress(openai.OpenAIError):
        client.with_options(max_retries=0).chat.completions.create(
            model=model, messages=HELLO, max_tokens=5
        )
