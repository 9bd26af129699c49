"""`ssd bench --only coreml`: what a converted model's decoding and prefill take, and on what."""

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from launch.bench.mac_report import format_probe
from launch.commands import bench
from protocol.errors import UsageError
from protocol.jobs.convert import FunctionCost
from protocol.jobs.coreml_probe import PrefillTime, ProbeResult
from tests.support.converted import converted_folder, source_folder


def test_speeds_are_per_token() -> None:
    """Of a call of one token and of many; the reference runtime is called that."""
    costs = [
        FunctionCost(name="decode", call_ms=20.0, tokens=1, unit="Neural Engine"),
        FunctionCost(name="prefill_64", call_ms=320.0, tokens=64, unit="reference"),
    ]
    found = ProbeResult(kind="functions", compute_units="all", costs=costs)
    first, second = format_probe(found)
    assert first == "all decode: 20.0 ms on Neural Engine (decoding: 50.0 tok/s)"
    assert "64 tokens a call: 200.0 tok/s; the reference runtime, not CoreML's speed" in second
    prompt = PrefillTime(tokens=128, mlx_ms=64.0, coreml_ms=256.0)
    [line] = format_probe(
        ProbeResult(
            kind="prefill", compute_units="reference", compute_unit="reference", prefills=[prompt]
        )
    )
    assert "by MLX (128 tokens a call: 2000.0 tok/s)" in line
    assert "500.0 tok/s; the reference runtime" in line


def test_a_pair_that_is_not_converted_is_refused() -> None:
    """With the command that converts."""
    options = ["--only", "coreml", "--model", str(source_folder("llama"))]
    options += ["--draft-backend", "ngram"]
    done = CliRunner().invoke(bench.command, options)
    assert isinstance(done.exception, UsageError)
    assert "ssd convert" in str(done.exception)


@pytest.mark.processes
def test_both_ways_are_measured(tmp_path: Path) -> None:
    """Functions and prompts of a target with its conversion beside it."""
    model = shutil.copytree(source_folder("llama"), tmp_path / "tiny")
    shutil.copytree(converted_folder("llama"), tmp_path / "tiny-coreml")
    out = tmp_path / "found.json"
    options = [
        "--only",
        "coreml",
        "--model",
        str(model),
        "--draft-backend",
        "ngram",
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(bench.command, options)
    assert done.exception is None, done.exception
    found = msgspec.json.decode(out.read_bytes(), type=list[ProbeResult])
    assert [one.kind for one in found] == ["functions", "prefill"]
    assert not any(one.failed for one in found)
    assert re.search(r"decoding: [\d.]+ tok/s; the reference runtime", done.output)
