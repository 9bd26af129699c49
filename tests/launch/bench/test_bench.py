"""`ssd bench`: its modes, its figures, its file, and the check that may not fail."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from launch.bench.result import BenchFile, BenchRun
from launch.bench.runs import comparable
from launch.bench.summary import bootstrap, categories, summary
from launch.bench.variant import parse, parse_all
from orchestrator.simulation.bound import Rounds, upper_bound_tok_s
from orchestrator.telemetry.recorder import Recorder
from protocol.errors import UsageError
from protocol.messages import Generate, RoundStats, Sampling, Statistics
from tests.launch.test_cli import MODEL, USAGE, complains, ssd
from tests.support.stack import eventually
from tests.support.tiny_models import write_tiny_model

LOSSY = 5
SCHEMA = Path(__file__).with_name("bench.schema.json")
ROOT = Path(__file__).parents[3]


# ---------------------------------------------------------------- modes


def test_a_mode_with_knobs() -> None:
    """All of them reach the request; what is not named stays as it was."""
    template = Generate(request=7, sampling=Sampling(temperature=0.7, seed=3), max_tokens=9)
    request = parse("ssd:k=4:b=12:rejection:saguaro=0.4").request(template)
    sampling = Sampling(temperature=0.7, seed=3, acceptance="rejection", saguaro=0.4)
    expected = Generate(
        request=7,
        sampling=sampling,
        max_tokens=9,
        mode="ssd",
        num_draft_tokens=4,
        branches=12,
    )
    assert request == expected
    assert parse("ar").request(template) == msgspec.structs.replace(template, mode="ar")


def test_references_have_their_own_lookahead() -> None:
    """mlx-lm's default is 3."""
    assert [
        parse(text).num_draft_tokens for text in ("mlx-lm", "mlx-lm-draft", "mlx-lm-draft:k=5")
    ] == [
        0,
        3,
        5,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "fast",
        "ssd:k",
        "ssd:k=many",
        "ssd:wide",
        "ar:k=3",
        "sd:b=4",
        "mlx-lm:k=2",
        "ssd,ssd",
        "",
        "ar:drafter=d",
        "ssd:drafter",
    ],
)
def test_modes_that_make_no_sense(text: str) -> None:
    """They are refused, not ignored."""
    with pytest.raises(UsageError):
        parse_all(text)


# ---------------------------------------------------------------- figures


def run(prompt: int, mode: str, tps: float, **more: Any) -> BenchRun:
    values: dict[str, Any] = {
        "prompt_id": prompt,
        "category": "chat" if prompt < 3 else "code",
        "mode": mode,
        "repeat": 0,
        "temperature": 0.0,
        "prompt_tokens": 5,
        "tokens": 11,
        "ttft_ms": 100.0,
        "decode_tps": tps,
        "decode_s": 10.0 / tps,
        "output_sha256": "0",
    }
    return BenchRun(**(values | more))


def test_speeds_are_medians_and_ratios_are_by_prompt() -> None:
    """A slow prompt is slow in every mode: its ratio counts, not its speed."""
    runs = [run(p, "ar", tps) for p, tps in enumerate([10.0, 20.0, 40.0, 80.0])]
    runs += [run(p, "ssd", tps) for p, tps in enumerate([15.0, 40.0, 80.0, 320.0])]
    found = summary(runs)["ssd"]
    assert found.median == 60.0
    assert found.speedup_vs_ar == 2.0
    assert found.ci95 is not None
    assert 1.5 <= found.ci95.low <= 2.0 <= found.ci95.high <= 4.0
    assert {name: modes["ssd"].runs for name, modes in categories(runs).items()} == {
        "chat": 3,
        "code": 1,
    }


def test_temperatures_are_kept_apart() -> None:
    """Each has plain decoding of its own."""
    runs = [run(p, "ar", 10.0) for p in range(3)]
    runs += [run(p, "ar", 20.0, temperature=0.7) for p in range(3)]
    runs += [run(p, "ssd", 30.0, temperature=0.7) for p in range(3)]
    found = summary(runs)
    assert list(found) == ["ar@0", "ar@0.7", "ssd@0.7"]
    assert found["ssd@0.7"].speedup_vs_ar == 1.5


def test_the_interval_is_repeatable_and_narrows() -> None:
    """The same values give the same interval; more values a narrower one."""
    few, many = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0] * 30
    assert bootstrap(few) == bootstrap(few)
    widths = [i.high - i.low for i in (bootstrap(few), bootstrap(many))]
    assert widths[1] < widths[0]
    assert bootstrap([2.0] * 5).low == bootstrap([2.0] * 5).high == 2.0


def statistics(**values: Any) -> Statistics:
    return msgspec.structs.replace(Recorder(0.0).summarise(), **values)


def test_hits_and_the_bound_are_pooled() -> None:
    """Theorem 7 from the kinds of rounds, efficiency from all tokens over all time."""
    told = statistics(
        rounds=10,
        drafted=30,
        accepted=15,
        cache_hits=6,
        cache_misses=3,
        by_origin={
            "hit": RoundStats(
                rounds=6, accepted=12, verify_ms=600.0, cache_lookups=6, cache_hits=4
            ),
            "target": RoundStats(
                rounds=3, accepted=1, verify_ms=240.0, cache_lookups=3, cache_hits=2
            ),
        },
        hits_by_rank=[4, 0, 2],
        draft_wait_ms=60.0,
        phase_ms={"idle_hit": 2.0},
    )
    found = summary([run(0, "ssd", 10.0, statistics=told, tokens=11, decode_s=1.0)])["ssd"]
    assert found.bound_tok_s == pytest.approx(22 / 0.9)
    assert found.efficiency == pytest.approx(10 / (22 / 0.9))
    assert found.hit_rate == pytest.approx(6 / 9)
    assert found.hit_rate_after == {"hit": 4 / 6, "target": 2 / 3}
    assert found.hits_within == [4 / 9, 4 / 9, 6 / 9]
    assert found.ipc_share == pytest.approx(0.012)
    assert found.mean_acceptance_length == 2.5
    hit, miss = Rounds(6, 18, 600.0), Rounds(3, 4, 240.0)
    assert found.bound_tok_s == upper_bound_tok_s(hit, miss, 60.0)


def schema() -> dict[str, Any]:
    """Of the file; what the protocol's messages hold is the protocol's affair."""
    found = msgspec.json.schema(BenchFile)
    messages = {"Statistics", "Sampling", "LogitsOptions", "RoundStats", "Schedule", "TraceEvent"}
    for name in messages & set(found["$defs"]):
        found["$defs"][name] = {"title": name, "type": "object"}
    return found


def test_the_schema_is_that_of_the_file() -> None:
    """Who changes a field changes the schema, and its version."""
    assert json.loads(SCHEMA.read_text()) == schema()


def test_the_rejection_rule_is_not_compared() -> None:
    """Above temperature 0 it has the law of plain decoding, not its tokens."""
    modes = parse_all("ar,ssd,ssd:rejection,mlx-lm")
    assert [comparable(mode, Sampling()) for mode in modes] == [True, True, True, False]
    warm = [comparable(mode, Sampling(temperature=0.7)) for mode in modes]
    assert warm == [True, True, False, False]


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("pair")
    target = write_tiny_model(base / "target", "llama", seed=1)
    draft = write_tiny_model(base / "draft", "llama", seed=1, noise=0.3)
    return ["--model", str(target), "--draft-model", str(draft)]


@pytest.mark.processes
def test_a_whole_benchmark(run_dir: Path, pair: list[str], tmp_path: Path) -> None:
    """All modes, two temperatures: file, page and verdict."""
    file, page = tmp_path / "bench.json", tmp_path / "bench.html"
    modes = "ar,sd,ssd,ssd:k=3:b=6,ssd:rejection,mlx-lm,mlx-lm-draft"
    flags = ["--modes", modes, "--temps", "0,0.8", "--seed", "4", "--limit", "2", "-m", "12"]
    outputs = ["--json", str(file), "--report", str(page)]
    done = ssd("bench", *pair, *flags, *outputs)
    assert done.returncode == 0, done.stderr.decode()
    said = done.stdout.decode()
    assert "lossless" in said
    found = json.loads(file.read_text())
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert len(found["runs"]) == 7 * 2 * 2
    assert found["checks"]["lossless"] is True
    # ssd:rejection is greedy at temperature 0, where both rules are one.
    assert found["checks"]["compared"] == 4 * 2 + 3 * 2
    hashes = {
        (r["prompt_id"], r["temperature"], r["output_sha256"])
        for r in found["runs"]
        if r["mode"] in {"ar", "sd", "ssd"}
    }
    assert len(hashes) == 4
    assert set(found["runs"][0]["peak_memory_gb"]) >= {"verifier", "drafter", "orchestrator"}
    assert found["profile"]["verify_ms"]["1"] > 0.0
    assert found["profile"]["prediction"]["best_mode"] in {"ar", "sd", "ssd"}
    assert 0.0 <= found["overlap"]["efficiency"] <= 1.0
    assert all(bool(r["timeline"]) == r["mode"].startswith("ssd") for r in found["runs"])
    html = page.read_text()
    assert "<svg" in html
    assert not re.search(r"(src|href)=.?http|url\(.?http|@import", html)


def drafted(file: Path, mode: str) -> int:
    """How many tokens were drafted in all runs of a mode."""
    runs = json.loads(file.read_text())["runs"]
    return sum(run["statistics"]["drafted"] for run in runs if run["mode"] == mode)


@pytest.mark.processes
def test_several_drafters_side_by_side(run_dir: Path, pair: list[str], tmp_path: Path) -> None:
    """Each has a stack of its own: who knows the target better is believed more often."""
    good = write_tiny_model(tmp_path / "good", "llama", seed=1)
    file = tmp_path / "bench.json"
    modes = f"ar,ssd:k=3,ssd:k=3:drafter={good}"

    def is_drafted() -> bool:
        flags = ["--modes", modes, "--limit", "2", "-m", "48", "--json", str(file)]
        # With the target's own arithmetic a drafter of the same weights is always right.
        flags += ["--set", "draft_weights=float", "--set", "cpu_activations=float"]
        done = ssd("bench", *pair, *flags)
        assert done.returncode == 0, done.stderr.decode()
        return all(drafted(file, mode) for mode in modes.split(",")[1:])

    eventually(is_drafted, "drafts come in time")
    found = json.loads(file.read_text())
    rates = {mode: figures["acceptance_rate"] for mode, figures in found["summary"].items()}
    assert rates[f"ssd:k=3:drafter={good}"] == 1.0
    assert rates["ssd:k=3"] < 1.0
    assert f"drafter {good}" in found["runs"][0]["peak_memory_gb"]


@pytest.mark.processes
def test_a_drafter_that_is_not_there(run_dir: Path, pair: list[str]) -> None:
    """Said before anything is measured."""
    done = ssd("bench", *pair, "--modes", "ar,ssd:drafter=nobody")
    complains(done, MODEL, "nobody")


@pytest.mark.processes
def test_only_the_overlap(run_dir: Path, pair: list[str]) -> None:
    """No runs, no verdict."""
    done = ssd("bench", *pair, "--only", "overlap")
    assert done.returncode == 0, done.stderr.decode()
    assert "together" in done.stdout.decode()
    assert "tok/s" not in done.stdout.decode()


@pytest.mark.processes
def test_a_temperature_that_is_none() -> None:
    """Refused before anything starts."""
    complains(ssd("bench", "--temps", "0,warm"), USAGE, "warm")
    complains(ssd("bench", "--temps", "0,-1"), USAGE, "temperature must be at least 0")


@pytest.mark.processes
def test_prompts_that_are_none(tmp_path: Path) -> None:
    """The file, the line, and what is wrong with it, in our words."""
    complains(ssd("bench", "--prompts", "/nofile"), USAGE, "'/nofile': No such file or directory")
    file = tmp_path / "prompts.jsonl"
    for line, words in (
        ('{"prompt": 7}', "prompt must be text, not a whole number"),
        ('{"id": 1}', "'prompt' is missing"),
    ):
        file.write_text(line)
        complains(ssd("bench", "--prompts", str(file)), USAGE, f"line 1: {words}")


@pytest.mark.processes
def test_a_lossy_patch_is_found_out(
    run_dir: Path, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that accepts what it should not: exit code 5, the first place, and the file."""
    home = tmp_path / "patched"
    for room in ("protocol", "services", "orchestrator", "launch"):
        ignored = shutil.ignore_patterns("default_drafter", "__pycache__")
        shutil.copytree(ROOT / room, home / room, ignore=ignored)
    patched = home / "services" / "verifier" / "acceptance.py"
    right = "            accepted = tree.walk(chosen)\n"
    assert right in patched.read_text()
    wrong = "            accepted = tree.path(len(tree) - 1)\n"
    patched.write_text(patched.read_text().replace(right, wrong))
    monkeypatch.setenv("PYTHONPATH", str(home))
    file = tmp_path / "bench.json"
    flags = ["--modes", "ar,ssd:k=3", "--limit", "2", "-m", "48", "--json", str(file)]
    runs = []

    def is_drafted() -> bool:
        runs.append(ssd("bench", *pair, *flags, cwd=home))
        return drafted(file, "ssd:k=3") > 0

    eventually(is_drafted, "drafts come in time")
    complains(runs[-1], LOSSY, "differ from plain decoding", "ssd:k=3", "margin")
    assert json.loads(file.read_text())["checks"]["lossless"] is False
