"""`ssd mac-check`, run where there is no Mac; and what its file may not tell."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launch import doctor
from launch.bench import mac_report
from launch.commands import mac_check
from launch.stack.child import Lifeline
from launch.workers.coreml_probe import ProbeWorker, open_probes
from protocol.jobs.coreml_probe import ProbeResult
from protocol.jobs.hardware import HardwareReport
from tests.support.converted import SLOTS, converted_folder, source_folder
from tests.support.stack import eventually

_DEADLINE_S = 240


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the command printed, and its file: a tiny model that drafts for itself."""
    out = tmp_path_factory.mktemp("mac-check") / "check.json"
    target, model = source_folder("llama"), converted_folder("llama")
    options = ["--model", model, "--target", target, "--out", out, "--seconds", 0.2]
    command = [sys.executable, "-m", "launch.cli", "mac-check", *map(str, options)]
    said = []

    def is_drafted() -> bool:
        done = subprocess.run(
            [*command, "--max-tokens", "12"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
        answers = json.loads(out.read_text())["answers"]
        return all(answer["accepted"] > 0 for answer in answers[1:3])

    eventually(is_drafted, "drafts come in time")
    return said[-1], out.read_text()


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac measures more, for minutes")
def test_all_that_can_be_measured_here_is_in_the_file(checked: tuple[str, str]) -> None:
    """Functions, injection and answers have figures; what has none is named."""
    report: dict[str, Any] = json.loads(checked[1])
    injection, half, functions, soak = report["probes"]
    assert not any(found["failed"] for found in report["probes"])
    assert [injection["dtype"], half["dtype"]] == ["float32", "float16"]
    assert injection["tokens"] == 512
    assert injection["milliseconds"] > 0
    assert [soak["calls"], soak["same_best"], soak["worst_logit"]] == [40, 1.0, 0.0]
    assert soak["slowest_ms"] > 0
    assert functions["compute_unit"] == "reference"
    names = [cost["name"] for cost in functions["costs"] if cost["call_ms"] > 0]
    assert names == [function["name"] for function in report["package"]["functions"]]
    assert names == ["tree", "decode", "prefill", "prefill_kv"]
    ways = [(answer["mode"], answer["num_draft_tokens"]) for answer in report["answers"]]
    assert ways == [("ar", 0), ("sd", 4), ("ssd", 4), ("ssd", 0)]
    assert all(answer["same_as_plain"] and answer["tokens"] for answer in report["answers"])
    assert not report["answers_failed"]
    assert report["versions"]["coremltools"]
    assert "there is no GPU here" in report["kernels"]["note"]
    assert len(report["not_measured"]) == 4 + 1  # its target has no conversion of that name


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac measures more, for minutes")
def test_people_read_the_same(checked: tuple[str, str]) -> None:
    """Every figure has a line, and so has everything that was not measured."""
    printed = checked[0]
    assert printed.count("tokens as plain decoding") == 4
    assert "reference decode: " in printed
    assert "injection of 512 tokens, float16: " in printed
    assert "40 calls on reference: " in printed
    assert "GPU kernels: there is no GPU here" in printed
    assert printed.count("not measured here: ") == 5


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac measures more, for minutes")
def test_the_file_holds_no_paths(checked: tuple[str, str]) -> None:
    """Not where models are, and not whose home it is."""
    assert str(source_folder("llama").parent) not in checked[1]
    assert str(Path.home()) not in checked[1]
    assert json.loads(checked[1])["model"] == converted_folder("llama").name


@pytest.mark.processes
def test_overlapping_loops_begin_together() -> None:
    """Neither begins before both are ready; one that dies does not hold the other."""
    loops = [
        {"kind": "draft-loop", "model": converted_folder("llama"), "compute_units": "reference"},
        {"kind": "target-loop", "target": source_folder("llama")},
        {"kind": "target-loop", "target": source_folder("llama") / "nowhere"},
    ]
    told: list[dict[str, Any]] = [
        {name: str(value) for name, value in loop.items()} | {"seconds": 0.1} for loop in loops
    ]
    with contextlib.closing(Lifeline()) as lifeline, open_probes(lifeline, *told) as started:
        draft, decode, dead = (one.measure() for one in started)
    assert "nowhere" in dead.failed
    assert min(draft.began_s, decode.began_s) >= max(draft.ready_s, decode.ready_s) > 0
    assert draft.per_second > 0
    assert decode.per_second > 0


@pytest.mark.processes
def test_prompts_are_timed_both_ways() -> None:
    """Of every length that fits, by the target itself and through its own package."""
    told = {"target": str(source_folder("llama")), "model": str(converted_folder("llama"))}
    with (
        contextlib.closing(Lifeline()) as lifeline,
        ProbeWorker(
            lifeline, kind="prefill", compute_units="reference", seconds=60.0, **told
        ) as one,
    ):
        found = one.measure()
    assert not found.failed
    assert [one.tokens for one in found.prefills] == [64, SLOTS]
    assert all(one.mlx_ms > 0 and one.coreml_ms > 0 for one in found.prefills)
    report = mac_report.MacReport(
        date="", machine={"system": "here"}, versions={}, model="m", package={}, probes=[found]
    )
    _, *said = mac_report.lines(report)
    assert [line.partition(":")[0] for line in said] == [
        "prefill of 64 tokens", f"prefill of {SLOTS} tokens",
    ]  # fmt: skip


def test_what_a_targets_own_conversion_adds() -> None:
    """Its prompts are measured; without one the report names what is missing."""
    options = {"seconds": 5.0}
    kinds = [[one["kind"] for one in mac_check._choose_probes("target", own, options)]
             for own in (None, Path("own"))]  # fmt: skip
    assert kinds[1] == [*kinds[0][:-1], "prefill", "soak"]
    assert mac_check._choose_probes("target", Path("own"), options)[-2]["seconds"] == 60.0


def test_an_answer_without_drafts_says_so() -> None:
    """None of none accepted would read as a drafter that is always wrong."""
    common: dict[str, Any] = {
        "tokens": 9, "tok_s": 1.0, "accepted": 0, "drafted": 0, "cache_hits": 0,
        "cache_misses": 0, "same_as_plain": True,
    }  # fmt: skip
    answers = [
        mac_report.MeasuredAnswer(mode=m, num_draft_tokens=0, **common) for m in ("ar", "sd")
    ]
    report = mac_report.MacReport(
        date="", machine={"system": "here"}, versions={}, model="m", package={}, answers=answers
    )
    _, plain, drafting = mac_report.lines(report)
    assert "0 of 0 accepted" in plain
    assert "nothing drafted in time" in drafting


def test_failures_are_told_without_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason stays; folders go, also those with a space in the home's name."""
    home = "/Users/jane doe"
    monkeypatch.setenv("HOME", home)
    text = f"'{home}/models/a-coreml' is no model; /opt/me/x.py failed, 3/4 done"
    found = ProbeResult(kind="functions", compute_units="cpu_and_ne", failed=text)
    report = mac_report.MacReport(
        date="", machine={}, versions={}, model="m", package={"parity": {"out": f"{home}/b"}},
        probes=[found], overlap={"alone": [found]}, answers_failed="'~/me/c' died",
    )  # fmt: skip
    cleaned = mac_report.without_paths(report)
    assert cleaned.probes[0].failed == "'a-coreml' is no model; x.py failed, 3/4 done"
    assert cleaned.overlap["alone"] == cleaned.probes
    assert cleaned.package == {"parity": {"out": "b"}}
    assert cleaned.answers_failed == "'c' died"


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Minutes of measuring are not lost to a mistyped folder."""
    options = ["--model", converted_folder("llama"), "--target", source_folder("llama")]
    told = [*map(str, options), "--out", str(tmp_path / "no" / "file.json")]
    done = CliRunner().invoke(mac_check.command, told)
    assert "its folder does not exist" in str(done.exception)
    assert "measuring" not in done.output


def test_the_doctor_points_to_it_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where coremltools is there, the doctor says what measures it; elsewhere why nothing."""
    survey = HardwareReport(
        mlx="0.0", device="metal", device_name="a chip", device_memory_bytes=1, devices=1,
        matrix_kernels="", coreml="9.0",
    )  # fmt: skip

    def neural_engine() -> doctor.Finding:
        findings = {finding.topic: finding for finding in doctor._examine_machine(survey)}
        return findings["Neural Engine"]

    monkeypatch.setattr(sys, "platform", "darwin")
    assert neural_engine().level == "ok"
    assert "ssd mac-check" in neural_engine().text
    monkeypatch.setattr(sys, "platform", "linux")
    assert "needs a Mac" in neural_engine().text
