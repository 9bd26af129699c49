"""The command line: what is wrong is said in one sentence, with its own exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stack import leftovers
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

USAGE, MODEL, RUNTIME = 2, 3, 4
SSD_S = 400.0
"""A whole benchmark takes a minute on a machine with two busy cores."""


def ssd(
    *arguments: str, stdin: bytes = b"", cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "launch.cli", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, timeout=SSD_S, check=False, cwd=cwd
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a tiny pair."""
    base = tmp_path_factory.mktemp("a pair")
    target = write_tiny_model(base / "target", "llama", seed=1)
    draft = write_tiny_model(base / "draft", "llama", seed=2)
    return ["--model", str(target), "--draft-model", str(draft)]


def complains(done: subprocess.CompletedProcess[bytes], code: int, *words: str) -> None:
    """One sentence, no traceback, the right exit code."""
    complaint = done.stderr.decode()
    assert code == done.returncode, complaint
    assert "Traceback" not in complaint
    for word in words:
        assert word in complaint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-such-flag"], ["--no-such-flag"]),
        (["hello", "--temp", "-1"], ["--temp"]),
        (["hello", "--draft-backend", "magic"], ["magic"]),
        (["hello", "--acceptance", "lenient"], ["lenient"]),
        (["hello", "--temp", "1", "--saguaro-c", "0.4"], ["rejection rule"]),
        ([""], ["the prompt is empty"]),
        ([], ["exactly one of"]),
        (["hello", "--prompt", "again"], ["exactly one of"]),
        (["--prompts", "no-such-file.jsonl"], ["no-such-file.jsonl"]),
    ],
)
def test_unusable_arguments(run_dir: Path, arguments: list[str], words: list[str]) -> None:
    """A flag, value or prompt that cannot be used ends with code 2 and names it."""
    complains(ssd("generate", *arguments), USAGE, *words)
    assert leftovers(run_dir) == []


def test_standard_input_that_is_not_text() -> None:
    """Bytes that are not UTF-8 are refused by name."""
    complains(ssd("generate", "-p", "-", stdin=b"\xff\xfe\x00"), USAGE, "not UTF-8")


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says of a file is a sentence that names it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "file"))
    complains(ssd("models", "add", "default"), RUNTIME, "Not a directory", str(tmp_path / "file"))


def test_a_prompts_file_with_a_broken_line(tmp_path: Path) -> None:
    """The line that is wrong is named."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "prompt": "x"}\n{"id": "b"}\n')
    complains(ssd("generate", "--prompts", str(file)), USAGE, "line 2", "prompt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("colour = 'red'\n", ["colour"]),
        ("restarts = 'many'\n", ["restarts"]),
        ("= 1", ["ssd.toml"]),
    ],
)
def test_unknown_settings_are_refused(tmp_path: Path, content: str, words: list[str]) -> None:
    """A key or value in ssd.toml that we do not know is an error, not ignored."""
    (tmp_path / "ssd.toml").write_text(content)
    complains(ssd("generate", "hello", cwd=tmp_path), USAGE, *words)


def test_a_missing_model_folder(run_dir: Path) -> None:
    """The path that is not there is named, and nothing is left."""
    complains(ssd("generate", "hello", "--model", "/no/such/model"), MODEL, "/no/such/model")
    assert leftovers(run_dir) == []


def test_a_broken_model_folder(run_dir: Path, tmp_path: Path) -> None:
    """Weights cut short are a model error of the verifier; nothing is left."""
    folder = write_tiny_model(tmp_path / "m", "llama", seed=1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    complains(ssd("generate", "hello", "--model", str(folder)), MODEL, str(folder))
    assert leftovers(run_dir) == []


def test_a_pair_that_does_not_share_its_tokenizer(
    run_dir: Path, tmp_path: Path, pair: list[str]
) -> None:
    """The drafter is refused with a sentence about the tokenizers."""
    other = write_tiny_model(tmp_path / "other", "llama", seed=3)
    description = json.loads((other / "tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(description))
    done = ssd("generate", "hello", *pair[:2], "--draft-model", str(other))
    complains(done, MODEL, "tokenizer")
    assert leftovers(run_dir) == []


def test_a_prompt_longer_than_the_context(run_dir: Path, pair: list[str]) -> None:
    """The prompt's length and the context's are both named."""
    done = ssd("generate", *pair, "-p", "-", stdin=b"word " * 5000)
    complains(done, USAGE, "context")
    assert leftovers(run_dir) == []


def test_json_has_the_agreed_fields(run_dir: Path, tmp_path: Path, pair: list[str]) -> None:
    """One object per prompt, with its id, the emitted ids and all statistics."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "prompt": "one two"}\n\n{"id": "b", "prompt": "three"}\n')
    done = ssd("generate", *pair, "--prompts", str(file), "--json", "-m", "12", "--temp", "0.5")
    assert done.returncode == 0, done.stderr.decode()
    records = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [record["id"] for record in records] == ["a", "b"]
    for record in records:
        assert {
            "text", "tokens", "prompt_tokens", "finish_reason", "model", "draft_model",
            "draft_backend", "mode", "seed", "stats",
        } <= set(record)  # fmt: skip
        assert {
            "ttft_ms", "decode_s", "tok_s", "rounds", "drafted", "accepted", "acceptance_rate",
            "mean_acceptance_length", "per_position", "cache_hits", "cache_misses", "hit_rate",
            "fallbacks", "overlap_ratio", "phase_ms", "drafter_restarts",
        } <= set(record["stats"])  # fmt: skip
    assert leftovers(run_dir) == []


def test_the_seed_repeats_an_answer(run_dir: Path, pair: list[str]) -> None:
    """The reported seed gives the same tokens again, in another mode too."""
    del run_dir
    first = ssd("generate", "hello", *pair, "--json", "-m", "12", "--temp", "1")
    record = json.loads(first.stdout)
    again = ssd(
        "generate", "hello", *pair, "--json", "-m", "12", "--temp", "1",
        "--seed", str(record["seed"]), "--mode", "ar",
    )  # fmt: skip
    assert record["tokens"] == json.loads(again.stdout)["tokens"]


def test_a_folder_named_like_ours_does_not_shadow(
    run_dir: Path, tmp_path: Path, pair: list[str]
) -> None:
    """Working in a directory with a `services` folder of one's own changes nothing."""
    del run_dir
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise RuntimeError('shadow')\n")
    script = Path(sys.executable).with_name("ssd")
    done = subprocess.run(
        [str(script), "generate", "hello", *pair, "-m", "4"],
        capture_output=True,
        timeout=SSD_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr.decode()
