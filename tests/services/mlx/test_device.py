"""Which device a process computes on."""

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from launch.models.pair import pair_of
from launch.settings import machine
from launch.settings.machine import child_environment
from launch.settings.settings import StackSettings, stack_settings
from protocol.errors import UsageError
from protocol.settings import Device
from services.mlx import device as device_module
from services.mlx.device import bind
from tests.launch.test_cli import USAGE, complains, ssd
from tests.support.tiny_models import write_tiny_model

no_cuda = pytest.mark.skipif(mx.cuda.is_available(), reason="there is CUDA here")


@pytest.fixture
def _device() -> Iterator[None]:
    before = mx.default_device()
    yield
    mx.set_default_device(before)


@pytest.mark.usefixtures("_device")
def test_the_cpu_can_be_chosen() -> None:
    """Its name is what the handshake says."""
    assert bind("cpu") == "cpu"
    assert mx.default_device() == mx.cpu


@pytest.mark.parametrize(
    ("unit", "info", "limits"),
    [("cuda", {"total_memory": 160}, [10]), ("cuda", {}, []), ("cpu", {"total_memory": 160}, [])],
)
def test_a_process_on_a_gpu_keeps_little_of_what_is_free(
    unit: str, info: dict[str, int], limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may want it: by itself MLX keeps all that it has ever had."""
    found: list[int] = []
    monkeypatch.setattr(device_module, "compute_unit", lambda: unit)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_cache_limit", found.append)
    assert bind("") == unit
    assert found == limits


@no_cuda
def test_a_gpu_that_is_not_there_is_refused() -> None:
    """By name, before a model is loaded."""
    with pytest.raises(UsageError, match="cuda:3"):
        bind("cuda:3")


@pytest.mark.parametrize("device", ["tpu", "cuda", "cuda:-1", "cuda:x", "GPU"])
def test_what_is_no_device_is_refused(device: str) -> None:
    """The settings name the field."""
    with pytest.raises(UsageError, match="target_device"):
        stack_settings({"target_device": device})


def test_a_cuda_process_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:N is the N-th of the GPUs that we see ourselves."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = child_environment("cuda:1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "PATH" in environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-6")
    environment = child_environment("cuda:1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-6"
    with pytest.raises(UsageError, match="cuda:2"):
        child_environment("cuda:2")


@pytest.mark.parametrize("device", ["", "cpu", "gpu", "cuda:0"])
def test_a_child_keeps_our_environment(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """But MLX's graph cache on CUDA is made larger, unless the user has said how large."""
    monkeypatch.setenv("MLX_CUDA_GRAPH_CACHE_SIZE", "7")
    environment = child_environment(device)
    assert environment.items() >= {"MLX_CUDA_GRAPH_CACHE_SIZE": "7"}.items()
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"
    monkeypatch.delenv("MLX_CUDA_GRAPH_CACHE_SIZE")
    assert child_environment(device)["MLX_CUDA_GRAPH_CACHE_SIZE"] == "2000"


def test_mlx_keeps_its_kernels_in_our_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, one folder for each version of MLX and each GPU, unless the user has said where."""
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(machine, "_GPUS", tmp_path / "gpus")
    assert "MLX_PTX_CACHE_DIR" not in child_environment("")  # nobody knows for which GPU
    for number in range(2):
        about = tmp_path / "gpus" / f"0000:0{number}:00.0" / "information"
        about.parent.mkdir(parents=True)
        about.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n")
    version = importlib.metadata.version("mlx")
    folder = tmp_path / "kernels" / f"{version}-NVIDIA_H100_80GB_HBM3"
    assert child_environment("")["MLX_PTX_CACHE_DIR"] == str(folder)
    other = tmp_path / "gpus" / "0000:09:00.0" / "information"
    other.parent.mkdir()
    other.write_text("Model: \t\t NVIDIA A100\n")
    assert "MLX_PTX_CACHE_DIR" not in child_environment("")  # MLX's kernels do not say for which
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "elsewhere")
    assert child_environment("")["MLX_PTX_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    assert "MLX_PTX_CACHE_DIR" not in child_environment("")


def test_a_drafter_without_a_model_has_no_device(tmp_path: Path) -> None:
    """ngram cannot be sent to a GPU."""
    target = write_tiny_model(tmp_path / "target", "llama")
    with pytest.raises(UsageError, match="ngram"):
        pair_of(StackSettings(model=str(target), draft_device="cuda:1"))


@no_cuda
@pytest.mark.processes
def test_the_verifier_refuses_a_missing_gpu(run_dir: Path, tmp_path: Path) -> None:
    """The stack does not start; its sentence and exit code are the child's."""
    target = write_tiny_model(tmp_path / "target", "llama")
    done = ssd("generate", "hello", "--model", str(target), "--target-device", "cuda:0")
    complains(done, USAGE, "cuda:0")
