"""`ssd demo`: what it counts, what it shows, and how it ends."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.commands.demo import set_up
from launch.models.registry import Report
from launch.terminal.demo import DemoAnswer, DemoResult, summarise
from protocol.errors import ModelError, RuntimeFailure, SsdError
from protocol.messages import Finished
from tests.launch.terminal.test_explain import statistics
from tests.support.stack import DEADLINE_S, eventually, leftovers
from tests.support.terminal import terminal
from tests.support.tiny_models import write_endless_model


def answer(tokens: list[int], decode_s: float) -> DemoAnswer:
    figures = statistics(tok_s=10 / decode_s, decode_s=decode_s)
    end = Finished(request=1, reason="length", prompt_tokens=3, statistics=figures)
    return DemoAnswer(tokens, end)


def test_times_as_fast_is_over_all_prompts() -> None:
    """Both times are sums, so a long answer counts more than a short one."""
    prose = DemoResult("prose", answer([1, 2, 3], 6.0), answer([1, 2, 3], 2.0))
    code = DemoResult("code", answer([4, 5], 2.0), answer([4, 5], 2.0))
    assert summarise([prose, code]) == [
        "2.00 times as fast as plain decoding: 4.0 s instead of 8.0 s (prose 3.00, code 1.00).",
        "Every token is the same: 5 of 5.",
    ]


@pytest.mark.parametrize("other", [[1, 9, 3], [1]])
def test_a_difference_is_told(other: list[int]) -> None:
    """Another token, or an answer that ends early."""
    result = DemoResult("code", answer([1, 2, 3], 1.0), answer(other, 2.0))
    faster, same = summarise([result])
    assert faster.startswith("0.50 times as fast")
    assert same.startswith("1 of 1 answers differ (code from token 1)")


class _Registry:
    """Sets up nothing; the large model cannot be fetched if there is a `failure`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: SsdError | None = None) -> None:
        self.added: list[str] = []
        self._failure = failure
        monkeypatch.setattr("launch.commands.demo.add_known", self._add)

    def _add(self, name: str, report: Report) -> None:
        del report
        if self._failure is not None and name != "default":
            raise self._failure
        self.added.append(name)


def test_the_real_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the demo's where it can be set up."""
    registry = _Registry(monkeypatch)
    assert set_up(small=False) == "coder"
    assert registry.added == ["coder"]


@pytest.mark.parametrize("failure", [RuntimeFailure("no route"), ModelError("no space")], ids=str)
def test_without_it_the_small_pair_answers(
    failure: SsdError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence says so, and why; --small asks for nothing else."""
    registry = _Registry(monkeypatch, failure)
    assert set_up(small=False) is None
    assert (
        f"answering with the small model, SmolLM2-135M, since {failure}" in capsys.readouterr().err
    )
    assert set_up(small=True) is None
    assert "SmolLM2-135M, as asked" in capsys.readouterr().err
    assert registry.added == ["default", "default"]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The demo with a tiny pair whose drafts are all accepted."""
    target, draft = (write_endless_model(tmp_path / name, "llama", seed=1) for name in "td")
    pair = ["--model", str(target), "--draft-model", str(draft)]
    return [sys.executable, "-m", "launch.cli", "demo", *pair, "-m", "24"]


@pytest.mark.processes
def test_without_a_terminal(command: list[str], run_dir: Path) -> None:
    """Four prompts, two answers each, no colours, and two lines at the end."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[\d/4\]", done.stdout, re.MULTILINE) == [f"[{n}/4]" for n in (1, 2, 3, 4)]
    assert done.stdout.count("24 tokens, ") == 8
    assert "\x1b" not in done.stdout
    *_, faster, same = done.stdout.splitlines()
    assert "`ssd chat --model " in done.stderr
    assert re.fullmatch(r"\d+\.\d\d times as fast as plain decoding: .* s instead of .*", faster)
    assert same == "Every token is the same: 96 of 96."
    assert leftovers(run_dir) == []


@pytest.mark.processes
def test_on_a_terminal_drafted_tokens_are_coloured(command: list[str]) -> None:
    """Green, yellow or cyan: drafted in time, drafted late, or looked up."""

    def is_coloured() -> bool:
        with terminal(command) as screen:
            seen = screen.wait_for("coloured tokens were drafted", "as fast as plain decoding")
            assert screen.end() == 0
        return re.search(r"\x1b\[3[236]m", seen) is not None

    eventually(is_coloured, "drafts come in time")


@pytest.mark.processes
def test_ctrl_c_leaves_nothing(command: list[str], run_dir: Path) -> None:
    """In the middle of an answer: no traceback, no process, no folder."""
    with terminal([*command[:-1], "100000"]) as screen:
        screen.wait_for("plain decoding:")
        screen.process.send_signal(signal.SIGINT)
        assert screen.end() == 128 + signal.SIGINT
        assert "Traceback" not in screen.seen
    assert leftovers(run_dir) == []
