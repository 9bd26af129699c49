"""What people read of our kernels for few rows on a GPU."""

from typing import Any

import msgspec
import pytest

from launch import doctor
from launch.bench import mac_report
from launch.models.pair import Pair
from launch.settings.settings import StackSettings
from launch.workers import kernel_report
from launch.workers.kernel_report import ask_kernel_report, describe_kernels
from protocol.errors import RuntimeFailure
from protocol.jobs.hardware import HardwareReport
from protocol.jobs.kernel_report import KernelProbe, KernelReport, KernelReportSettings

_USED = KernelProbe(
    kernel="product", shape="4096 to 14336, 4 bits, groups of 64, float16", layers=64,
    least_rows=1, own_ms={1: 0.1, 8: 0.1234}, mlx_ms={1: 0.1, 8: 0.27},
)  # fmt: skip
_SEVERAL = msgspec.structs.replace(_USED, least_rows=2, reason="fewer are faster by MLX")
_ON_CUDA = msgspec.structs.replace(
    _USED, shape="products of 5 shapes, float16", least_rows=2, most_rows=16,
    reason="more are faster by MLX", distance=0.0004,
)  # fmt: skip
_BROKEN = KernelProbe(
    kernel="attention", shape="32 heads of 128 over 8, float16", reason="it does not run here: why"
)
_FOUND = KernelReport(
    probes=[_USED, _SEVERAL, _ON_CUDA, _BROKEN], pass_ms={1: 20.0, 2: 30.06},
    pass_with_kernels_ms={1: 21.0, 2: 22.0},
)  # fmt: skip


def test_each_kernel_has_a_line() -> None:
    """Whether it is used, why not, and what was measured of it and of MLX's; then whole passes."""
    assert list(describe_kernels(_FOUND)) == [
        "product, 64 x 4096 to 14336, 4 bits, groups of 64, float16: used; "
        "1, 8 rows take 0.1 / 0.123 ms (MLX: 0.1 / 0.27 ms)",
        "product, 64 x 4096 to 14336, 4 bits, groups of 64, float16: used from 2 rows on, "
        "fewer are faster by MLX; 1, 8 rows take 0.1 / 0.123 ms (MLX: 0.1 / 0.27 ms)",
        "product, 64 x products of 5 shapes, float16: used for 2 to 16 rows, "
        "more are faster by MLX; 1, 8 rows take 0.1 / 0.123 ms (MLX: 0.1 / 0.27 ms); "
        "0.0004 from MLX's result",
        "attention, 32 heads of 128 over 8, float16: not used, it does not run here: why",
        "a verification of 1 to 2 rows: 20 / 30.1 ms",
        "the same with every kernel that is right: 21 / 22 ms",
    ]


def test_mac_check_shows_them() -> None:
    report = mac_report.MacReport(
        date="", machine={"system": "here"}, versions={}, model="m", package={}, kernels=_FOUND
    )
    said = [line for line in mac_report.lines(report) if line.startswith("GPU kernels: ")]
    assert len(said) == 6


_PAIR = Pair(model="m", draft_model="", backend="ngram")


def _survey(device: str) -> HardwareReport:
    return HardwareReport(
        mlx="1", device=device, device_name="one", device_memory_bytes=0, devices=1,
        matrix_kernels="", coreml="",
    )  # fmt: skip


def test_without_a_gpu_the_reports_say_so() -> None:
    """No process is started for it."""
    note = "there is no GPU here; what a CPU uses is listed under `kernels`"
    assert ask_kernel_report("nowhere", "auto", "cpu") == KernelReport(note=note)
    found = doctor._examine_kernels(_PAIR, StackSettings(), _survey("cpu"))
    assert found == [doctor.Finding("note", "GPU kernels", note)]


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_on_a_gpu_a_process_is_asked(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """With the target and the setting; what it says is shown, or what it died of."""
    asked: list[tuple[Any, ...]] = []

    def run_module(name: str, module: str, settings: str, *, timeout_s: float) -> str:
        asked.append((module, msgspec.json.decode(settings, type=KernelReportSettings)))
        if len(asked) > 1:
            raise RuntimeFailure("the kernel report was killed by signal 9")
        return msgspec.json.encode(_FOUND).decode()

    monkeypatch.setattr(kernel_report, "run_module", run_module)
    found = doctor._examine_kernels(_PAIR, StackSettings(metal_kernels="on"), _survey(device))
    assert [finding.level for finding in found] == ["ok"] * 6
    told = KernelReportSettings(model="m", kernels="on")
    assert asked == [("services.tools.kernel_report", told)]
    killed = doctor._examine_kernels(_PAIR, StackSettings(), _survey(device))
    assert [(one.level, one.text) for one in killed] == [
        ("note", "the kernel report was killed by signal 9")
    ]
