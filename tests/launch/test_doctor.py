"""The doctor's findings, on folders that are well and on folders that are not."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest
from coremltools.models import compute_device
from mlx.utils import tree_flatten

from launch import doctor
from launch.models.coreml_facts import conversion_in
from launch.models.coreml_models import default_conversion_dir
from launch.models.weights import weights_of
from launch.settings.settings import StackSettings
from protocol.errors import ModelError
from protocol.jobs.hardware import HardwareReport
from protocol.jobs.kernel_report import KernelReport
from services.coreml.manifest import read_manifest
from services.coreml.runtime import devices
from services.mlx.loader import load
from services.mlx.selftest import TOLERANCES
from tests.support.converted import SLOTS, converted_folder
from tests.support.reference import tiny_folder
from tests.support.stack import DEADLINE_S
from tests.support.tiny_models import write_tiny_model

SURVEY = HardwareReport(
    mlx="0.0", device="cpu", device_name="a chip", device_memory_bytes=0, devices=1,
    matrix_kernels="CPU kernels and MKL", coreml="",
)  # fmt: skip


@pytest.fixture
def examined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layers_in_process: None
) -> Callable[..., dict[str, Any]]:
    """The findings for these settings, by topic; no other process is asked."""
    monkeypatch.setattr(doctor, "ask_hardware", lambda: SURVEY)
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))

    def examine(**settings: Any) -> dict[str, Any]:
        report = doctor.examine(StackSettings(**settings))
        found = {finding.topic: finding for finding in report.findings}
        return found | {"healthy": report.healthy}

    return examine


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3", "gemma3", "quantized"])
def test_sizes_are_those_of_the_loaded_model(family: str) -> None:
    """Parameters and bytes, read from the files' heads, are what loading gives."""
    folder = tiny_folder(family)
    found = weights_of(folder)
    parameters: Any = tree_flatten(load(folder).module.parameters())
    assert found.parameters == sum(array.size for _, array in parameters)
    least = found.bytes_as_stored if family != "gemma3" else 4 * found.parameters
    assert least <= found.bytes_on("cpu") <= 1.5 * least
    stored: Any = mx.load(str(folder / "model.safetensors"))
    assert found.bytes_on("metal") == sum(array.nbytes for array in stored.values())
    config = json.loads((folder / "config.json").read_text())
    shape = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert found.kv_bytes_on("cuda") == found.kv_bytes_on("cpu") == 4 * shape
    unknown = found._replace(architecture="unknown")
    assert unknown.kv_bytes_on("cpu") == 8 * shape


def test_a_pair_that_fits(examined: Callable[..., dict[str, Any]]) -> None:
    """Two models of one tokenizer: what would be started, and nothing in the way."""
    found = examined(model=str(tiny_folder("llama")), draft_model=str(tiny_folder("llama")))
    assert found["healthy"]
    assert found["pair"].level == "ok"
    assert "drafter (mlx)" in found["stack"].text
    assert found["schedule"].level == "note"  # it is as large as the target
    assert "1.00 passes, both share the device" in found["schedule"].text


def test_other_tokenizers_are_a_problem(
    examined: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A drafter that speaks other tokens cannot draft."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "other")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][0]["content"] = "<other>"
    path.write_text(json.dumps(content))
    found = examined(model=str(tiny_folder("llama")), draft_model=str(folder))
    assert (found["healthy"], found["pair"].level) == (False, "problem")
    assert "different tokenizers" in found["pair"].text


def test_a_configuration_of_other_weights_is_a_problem(
    examined: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """What mlx-lm says of them is the finding: no stack would start."""
    folder = write_tiny_model(tmp_path / "t", "llama")
    assert examined(model=str(folder))["layers"].level == "ok"
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    assert config.read_text(encoding="utf-8") != text
    found = examined(model=str(folder))
    assert (found["healthy"], found["layers"].level) == (False, "problem")
    assert "parameters not in model" in found["layers"].text


def test_too_little_memory_is_a_problem(
    examined: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and a context's KV must fit what is free."""
    small = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: small)
    found = examined(model=str(tiny_folder("llama")))
    assert (found["healthy"], found["memory"].level) == (False, "problem")


def test_a_converted_drafter_is_no_problem(examined: Callable[..., dict[str, Any]]) -> None:
    """It has no safetensors, and its state's size is its own."""
    folder = converted_folder("llama")
    found = examined(model=str(tiny_folder("llama")), draft_model=str(folder))
    assert (found["healthy"], found["pair"].level) == (True, "ok")
    assert f"3 layers for CoreML, {SLOTS} tokens" in found["drafter"].text
    assert "drafter (coreml)" in found["stack"].text
    shape = read_manifest(folder).architecture
    conversion = conversion_in(folder)
    state = 2 * shape.layers * shape.kv_heads * shape.head_dim * SLOTS * np.float16().nbytes
    assert conversion.state_bytes == state
    package = (folder / "model.mlpackage" / "Data").rglob("*")
    assert conversion.weight_bytes > sum(f.stat().st_size for f in package if f.is_file()) > 1e4


def test_conversions_beside_the_models_are_listed(
    examined: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """What it is for; and a manifest that cannot be read is a note, since MLX needs none."""
    folder = write_tiny_model(tmp_path / "t", "llama")
    shutil.copytree(converted_folder("llama"), default_conversion_dir(folder))
    found = examined(model=str(folder))
    assert f"{default_conversion_dir(folder)}: 3 layers" in found["converted"].text
    assert "--set prefill=coreml" in found["converted"].text
    (default_conversion_dir(folder) / "coreml.json").write_text("{}")
    found = examined(model=str(folder))
    assert (found["healthy"], found["converted"].level) == (True, "note")


def test_coremls_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the doctor prints them; a class that is not known keeps its name."""
    names = ("MLCPUComputeDevice", "MLGPUComputeDevice", "MLNeuralEngineComputeDevice", "MLNew")
    listed = [type(name, (), {"total_core_count": 16})() for name in names]
    monkeypatch.setattr(compute_device.MLComputeDevice, "get_all_compute_devices", lambda: listed)
    found = devices.units()
    assert found == ["cpu", "gpu", "Neural Engine (16 cores)", "MLNew"]
    values = {name: getattr(SURVEY, name) for name in SURVEY.__struct_fields__}
    survey = HardwareReport(**values | {"coreml": "9.0", "coreml_units": found})
    monkeypatch.setattr(sys, "platform", "darwin")
    said = {finding.topic: finding for finding in doctor._examine_machine(survey)}["Neural Engine"]
    assert "reaches cpu, gpu, Neural Engine (16 cores), MLNew" in said.text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64),
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("{}"),
    ],
)
def test_broken_folders_are_named(
    spoil: Callable[[Path], object], examined: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Whatever is wrong with a file, it is a finding and no traceback."""
    folder = write_tiny_model(tmp_path / "t", "llama")
    spoil(folder)
    with pytest.raises(ModelError, match="t'"):
        weights_of(folder)
    found = examined(model=str(folder))
    assert (found["healthy"], found["target"].level) == (False, "problem")


def test_the_missing_default_pair_is_a_problem(examined: Callable[..., dict[str, Any]]) -> None:
    """It says what to run."""
    found = examined()
    assert "ssd models add default" in found["pair"].text


def test_slow_kernels_and_shared_devices_are_noted(
    examined: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What costs speed only is a note."""
    tiny = str(tiny_folder("llama"))
    values = {name: getattr(SURVEY, name) for name in SURVEY.__struct_fields__}
    one_gpu = HardwareReport(**values | {"device": "metal", "matrix_kernels": ""})
    monkeypatch.setattr(doctor, "ask_hardware", lambda: one_gpu)
    report = KernelReport(note="nothing was measured")
    monkeypatch.setattr(doctor, "ask_kernel_report", lambda *_: report)
    found = examined(model=tiny, draft_model=tiny)
    assert (found["GPU kernels"].level, found["GPU kernels"].text) == ("note", report.note)
    assert (found["healthy"], found["stack"].level) == (True, "note")
    assert "take turns" in found["stack"].text


@pytest.mark.processes
def test_the_command(tmp_path: Path) -> None:
    """The real survey, as JSON on standard output; a problem has exit code 4."""

    def ask(model: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch.cli", "doctor", "--json", "--model", str(model)]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=DEADLINE_S
        )

    done = ask(tiny_folder("llama"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["survey"]["device"] in ("cpu", "metal", "cuda")
    assert report["survey"]["tolerances"] == TOLERANCES
    assert any("product 0.01, attention 0.01" in one["text"] for one in report["findings"])
    assert report["versions"]["mlx-lm"]
    done = ask(tmp_path / "none")
    assert done.returncode == 4
    assert "give a folder, a GGUF file or a hub name" in done.stdout
