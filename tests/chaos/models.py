"""`python -m tests.chaos models`: several models of one server, whose processes are killed."""

import contextlib
import json
import random
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from launch.serving.model_server import ModelServer
from launch.serving.models_file import ModelEntry, read_models
from launch.settings.flags import Command
from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor
from launch.stack.run_dir import RunDir
from launch.terminal import console
from protocol.errors import LosslessnessError, RuntimeFailure
from protocol.messages import ChatMessage, Generate, ProcessStatus, Stack, StackRequest
from tests.chaos.http_client import Heard, ask_http
from tests.support.tiny_models import write_tiny_model

_MANY = 10**9
_REPLY_S = 10.0
_LAST_S = 120.0
_GATEWAY = 0.1
"""Share of strikes that hit the gateway, not a model."""
_ALL = 0.5
"""Share of the others that hit all processes of a model, not one."""
_CLOCK_SLACK_S = 2.0
_QUESTIONS = ("Name three rivers.", "def add(a, b):", "Repeat this: the blue bird sings.")
_FAMILIES = ("llama", "qwen3", "gemma2", "moe", "llama3")


@click.command("models", cls=Command)
@click.option("--models", type=click.IntRange(2, len(_FAMILIES)), default=3, show_default=True)
@click.option("--clients", type=click.IntRange(min=1), default=2, help="For each model.")
@click.option("--strikes", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--minutes", type=click.FloatRange(min=0.1), default=30.0, help="At most.")
@click.option("--memory-bytes", type=click.IntRange(min=0), default=0, help="For all models.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=96, show_default=True)
@click.option("--patience", type=click.FloatRange(min=1), default=120.0, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the outcome.")
@click.option("--verbose", is_flag=True, help="Name every strike and every change of a process.")
def command(**options: Any) -> None:
    """Kill processes of one model while clients of all models compare every answer.

    A model that was not struck must go on as if nothing had happened; one that was must answer
    again. With little memory the models also take each other's place.
    """
    seen: dict[int, float] = {}  # when each was created: its number may be given again

    def report(status: ProcessStatus) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen[status.pid] = psutil.Process(status.pid).create_time()
        if options["verbose"]:
            console.process_line(status)

    with tempfile.TemporaryDirectory(prefix="ssd-c-") as folder:
        for number, family in enumerate(_FAMILIES[: options["models"]]):
            write_tiny_model(Path(folder) / f"{family}", family, seed=number)
        settings = StackSettings(
            http=True, port=0, models=folder, restarts=_MANY,
            memory_bytes=options["memory_bytes"],
        )  # fmt: skip
        entries = read_models(Path(folder), settings)
        server = ModelServer(settings, entries, RunDir("chaos-models"), report)
        try:
            server.start()
            summary = _strike_and_ask(server, entries, options)
        finally:
            server.stop()
    summary["left"] = [pid for pid, created in seen.items() if _runs(pid, created)]
    if options["json_file"] is not None:
        options["json_file"].write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    console.write(json.dumps(summary, indent=1) + "\n")
    _judge(summary, options["clients"] * options["models"])


def _strike_and_ask(
    server: ModelServer, entries: list[ModelEntry], options: dict[str, Any]
) -> dict[str, Any]:
    names = [entry.name for entry in entries]
    known = _learn_answers(server.url, names, options["max_tokens"])
    load = _Load(server.url, known, options["clients"], options["seed"])
    slugs = {entry.name: entry.slug for entry in entries}
    campaign = _Campaign(server, slugs, load, options)
    try:
        campaign.run()
    finally:
        hung = load.end()
    return {
        "strikes": dict(campaign.strikes),
        "longest_mending_s": round(campaign.longest_s, 2),
        "hung": hung,
        "models": {name: vars(load.tallies[name]) for name in names},
    }


# ---------------------------------------------------------------- clients

_Case = tuple[str, Generate, str]
"""A model's name, a request, and its undisturbed answer."""


def _learn_answers(url: str, names: list[str], max_tokens: int) -> list[_Case]:
    cases: list[_Case] = []
    for name in names:
        for question in _QUESTIONS:
            messages = [ChatMessage("user", question)]
            request = Generate(request=1, messages=messages, max_tokens=max_tokens)
            heard = ask_http(url, request, lambda: None, name)
            if not heard.whole:
                raise RuntimeFailure(f"the model {name!r} does not answer: {heard.refused}")
            cases.append((name, request, heard.text))
    return cases


@dataclass
class _Tally:
    """What the clients of one model have seen."""

    answered: int = 0
    cut_off: int = 0
    """Streams that broke, so that the client knew; what had come was right."""
    refused: list[str] = field(default_factory=list)
    turned_away: int = 0
    """Answered by a status that says to try again, while the model was struck."""
    changed: int = 0


class _Load:
    """Clients in threads; each asks one model all the time."""

    def __init__(self, url: str, known: list[_Case], clients: int, seed: int) -> None:
        self._url = url
        self._known = known
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.struck: deque[str] = deque(maxlen=2)
        """Models that the last strikes hit; "gateway" stands for all of them."""
        self.tallies = {name: _Tally() for name, _, _ in known}
        self._threads = [
            threading.Thread(target=self._run, args=(name, seed + index), daemon=True)
            for index in range(clients)
            for name in self.tallies
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str, seed: int) -> None:
        dice = random.Random(seed)  # noqa: S311  # no secret
        own = [case for case in self._known if case[0] == name]
        while not self._ending.is_set():
            _, request, expected = dice.choice(own)
            heard = ask_http(self._url, request, lambda: None, name)
            with self._lock:
                self._note(name, heard, expected)

    def _note(self, name: str, heard: Heard, expected: str) -> None:
        tally = self.tallies[name]
        if heard.refused == "HTTP 503" and {name, "gateway"} & {*self.struck}:
            tally.turned_away += 1
        elif heard.refused:
            tally.refused.append(heard.refused)
        elif heard.whole:
            tally.answered += 1
            tally.changed += heard.text != expected
        else:
            tally.cut_off += 1
            tally.changed += not expected.startswith(heard.text)

    def count_answers(self) -> dict[str, int]:
        """Whole answers so far, by model."""
        return {name: tally.answered for name, tally in self.tallies.items()}

    def end(self) -> int:
        """Let the last answers finish; how many clients did not come back."""
        self._ending.set()
        end = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)


# ---------------------------------------------------------------- strikes


class _Campaign:
    """One strike after another; before the next, every model has answered twice."""

    def __init__(
        self, server: ModelServer, slugs: dict[str, str], load: _Load, options: dict[str, Any]
    ) -> None:
        self._server = server
        self._slugs = slugs
        self._load = load
        self._options = options
        self._dice = random.Random(options["seed"])  # noqa: S311  # no secret
        self.strikes: Counter[str] = Counter()
        self.longest_s = 0.0

    def run(self) -> None:
        """Raises RuntimeFailure if a model does not answer again."""
        end = time.monotonic() + 60 * self._options["minutes"]
        while sum(self.strikes.values()) < self._options["strikes"] and time.monotonic() < end:
            time.sleep(self._dice.uniform(0.0, 0.5))
            struck = self._strike()
            if not struck:
                continue
            self.strikes[struck] += 1
            if self._options["verbose"]:
                console.stderr().print(f"killed: {struck}", markup=False)
            self._await_answers(struck)

    def _strike(self) -> str:
        """Who was killed; empty if there was nothing to kill."""
        processes = self._list_processes()
        gateway = [p for p in processes if p.role == "gateway"]
        if self._dice.random() < _GATEWAY:
            self._load.struck.append("gateway")
            return "gateway" if self._kill(gateway) else ""
        model, slug = self._dice.choice(sorted(self._slugs.items()))
        own = [p for p in processes if p.role.startswith(f"{slug} ")]
        if not own:
            return ""
        self._load.struck.append(model)
        if self._dice.random() < _ALL:
            return f"{model}, all" if self._kill(own) else ""
        one = self._dice.choice(own)
        return f"{model}, {one.role.removeprefix(slug).strip()}" if self._kill([one]) else ""

    def _list_processes(self) -> list[ProcessStatus]:
        answer = ask_supervisor(self._server.run_dir.path.name, StackRequest(), _REPLY_S)
        return answer.processes if isinstance(answer, Stack) else []

    @staticmethod
    def _kill(processes: list[ProcessStatus]) -> bool:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(process.pid).send_signal(signal.SIGKILL)
        return bool(processes)

    def _await_answers(self, struck: str) -> None:
        """Two more whole answers of each model: one may have been on its way."""
        started, before = time.monotonic(), self._load.count_answers()
        while late := [
            name for name, count in self._load.count_answers().items() if count < before[name] + 2
        ]:
            took = time.monotonic() - started
            if took > self._options["patience"]:
                raise RuntimeFailure(f"{took:.0f} s after {struck!r}: no answers of {late}")
            time.sleep(0.02)
        self.longest_s = max(self.longest_s, time.monotonic() - started)


def _runs(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < _CLOCK_SLACK_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _judge(summary: dict[str, Any], clients: int) -> None:
    tallies = summary["models"].values()
    if sum(tally["changed"] for tally in tallies):
        raise LosslessnessError("answers were not those of the undisturbed models")
    gateways = summary["strikes"].get("gateway", 0)
    if sum(tally["cut_off"] for tally in tallies) > gateways * clients:
        raise RuntimeFailure("more streams broke off than gateways were killed")
    if any(tally["refused"] for tally in tallies) or summary["hung"] or summary["left"]:
        raise RuntimeFailure("requests were refused or hung, or processes are left; see above")
