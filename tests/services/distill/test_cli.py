"""`ssd distill` from the outside: real processes, signals, and input that cannot be used."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.workers.chat_template import Form, form_of
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.errors import UsageError
from services.distill import checkpoint
from tests.support.stack import DEADLINE_S, eventually
from tests.support.tiny_models import write_tiny_model

SMALL = tuple(
    part
    for pair in ("length=32", "user_tokens=4", "data_batch=16", "batch=8")
    for part in ("--set", pair)
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("t"), "llama")


def start(*arguments: object, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "distill", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def ssd_distill(*arguments: object) -> tuple[int, str, str]:
    return ended(start(*arguments))


@pytest.mark.processes
def test_interrupted_resumed_and_judged(target: Path, tmp_path: Path) -> None:
    """Ctrl-C in mid-training saves; the same command finishes; --evaluate judges on prompts."""
    out = tmp_path / "out"
    endless = ("--target", target, "--out", out, *SMALL, "--set", "data_tokens=600")
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = start(*endless, "--set", "steps=100000", stderr=stderr)
        try:
            eventually(lambda: "training 0%" in log.read_text(), "training has begun")
            process.send_signal(signal.SIGINT)
            assert ended(process)[0] == 130
        finally:
            process.kill()
    err = log.read_text()
    assert "goes on from here" in err
    assert "Traceback" not in err
    saved = checkpoint.load(out)
    assert saved is not None
    steps = saved.position.step
    assert steps > 0
    assert not (out / "model.safetensors").exists()

    code, text, err = ssd_distill(*endless, "--set", f"steps={steps + 5}", "--json")
    assert (code, json.loads(text)["complete"]) == (0, True), err
    assert json.loads((out / "distill.json").read_text())["steps"] == steps + 5

    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "the quick fox", "category": "chat", "id": 7}\n')
    judged = ("--evaluate", out, "--target", target, "--prompts", prompts, "--set", "length=48")
    code, text, err = ssd_distill(*judged, "--json")
    assert code == 0, err
    figures = json.loads(text)["figures"]
    assert figures["by_category"] == {"chat": figures["greedy_agreement"]}


@pytest.mark.processes
def test_prompts_of_ones_own(target: Path, tmp_path: Path) -> None:
    """--prompts: all are answered at every temperature, and the data ends there."""
    prompts = tmp_path / "p.jsonl"
    lines = [json.dumps({"prompt": f"lazy dog {n}"}) for n in range(12)]
    prompts.write_text("\n".join(lines))
    out = tmp_path / "out"
    options = (
        "--set",
        "data_tokens=100000",
        "--set",
        "steps=3",
        "--prompts",
        prompts,
        "--set",
        "length=40",
    )
    code, _, err = ssd_distill("--target", target, "--out", out, *SMALL, *options)
    assert code == 0, err
    assert "every prompt was answered" in err
    rows: list[Any] = []
    for path in sorted((out / "data").glob("*.json")):
        rows += json.loads(path.read_text())["rows"]
    assert len(rows) == 48
    assert len({(row["group"], row["temperature"]) for row in rows}) == 48


def without_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"], config["bos_token"]
    path.write_text(json.dumps(config))


def recurrent(folder: Path) -> None:
    write_tiny_model(folder, "mamba")


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("spoil", "options", "code", "words"),
    [
        (without_template, [], 2, "neither a chat template nor"),
        (recurrent, [], 3, "mamba"),
        (not_json, [], 3, "not JSON"),
        (None, ["--layers", "7"], 2, "has 3 layers"),
        (None, ["--prompts", "/none.jsonl"], 2, "cannot read the prompts file"),
        (None, ["--set", "length=3"], 2, "length"),
        (None, ["--out", "/proc/none"], 2, "cannot write"),
        (None, ["--evaluate", "/proc"], 2, "either --out"),
    ],
)
def test_bad_input_is_one_sentence(
    spoil: Callable[[Path], None] | None, options: list[str], code: int, words: str, tmp_path: Path
) -> None:
    """Exit code of the error's branch, a sentence, no traceback."""
    folder = write_tiny_model(tmp_path / "t", "llama")
    if spoil is not None:
        spoil(folder)
    given = ["--target", folder, "--out", tmp_path / "out", *SMALL, "--set", "data_tokens=100"]
    found, _, err = ssd_distill(*given, *options)
    assert found == code
    assert words in err
    assert "Traceback" not in err


def test_a_missing_target_is_named(tmp_path: Path) -> None:
    """No folder, no hub name: exit code 3."""
    code, _, err = ssd_distill("--target", tmp_path / "none", "--out", tmp_path / "out")
    assert (code, "no model at" in err) == (3, True)


def test_the_form_of_conversations(target: Path, tmp_path: Path) -> None:
    """Opening and turn are the template's tokens around the words; without one, texts start."""
    assert form_of(TargetTokenizer(target)) == Form([0, 2], [3])
    folder = write_tiny_model(tmp_path, "llama")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    assert form_of(TargetTokenizer(folder)) == Form([0], [])
    without = {key: value for key, value in config.items() if key != "bos_token"}
    path.write_text(json.dumps(without))
    with pytest.raises(UsageError):
        form_of(TargetTokenizer(folder))
