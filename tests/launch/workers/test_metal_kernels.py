"""What people read of our kernels on Metal."""

import sys
from typing import Any

import msgspec
import pytest

from launch import doctor
from launch.bench import mac_report
from launch.models.pair import Pair
from launch.settings.settings import StackSettings
from launch.workers import metal_kernels
from launch.workers.metal_kernels import ask_metal_kernels, describe_kernels
from protocol.errors import RuntimeFailure
from protocol.jobs.metal_kernels import KernelProbe, MetalKernelsReport, MetalKernelsSettings

_USED = KernelProbe(
    kernel="product", shape="4096 to 14336, 4 bits, groups of 64, float16", layers=64,
    least_rows=1, own_ms={1: 0.1, 8: 0.1234}, mlx_ms={1: 0.1, 8: 0.27},
)  # fmt: skip
_SEVERAL = msgspec.structs.replace(_USED, least_rows=2, reason="fewer are faster by MLX")
_BROKEN = KernelProbe(
    kernel="attention", shape="32 heads of 128 over 8, float16", reason="it does not run here: why"
)
_FOUND = MetalKernelsReport(
    probes=[_USED, _SEVERAL, _BROKEN], pass_ms={1: 20.0, 2: 30.06},
    pass_with_kernels_ms={1: 21.0, 2: 22.0},
)  # fmt: skip


def test_each_kernel_has_a_line() -> None:
    """Whether it is used, why not, and what was measured of it and of MLX's; then whole passes."""
    assert list(describe_kernels(_FOUND)) == [
        "product, 64 x 4096 to 14336, 4 bits, groups of 64, float16: used; "
        "1, 8 rows take 0.1 / 0.123 ms (MLX: 0.1 / 0.27 ms)",
        "product, 64 x 4096 to 14336, 4 bits, groups of 64, float16: used from 2 rows on, "
        "fewer are faster by MLX; 1, 8 rows take 0.1 / 0.123 ms (MLX: 0.1 / 0.27 ms)",
        "attention, 32 heads of 128 over 8, float16: not used, it does not run here: why",
        "a verification of 1 to 2 rows: 20 / 30.1 ms",
        "the same with every kernel that is right: 21 / 22 ms",
    ]


def test_mac_check_shows_them() -> None:
    report = mac_report.MacReport(
        date="", machine={"system": "here"}, versions={}, model="m", package={}, kernels=_FOUND
    )
    said = [line for line in mac_report.lines(report) if line.startswith("Metal kernels: ")]
    assert len(said) == 5


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has Metal")
def test_without_metal_the_reports_say_so() -> None:
    """No process is started for it."""
    note = "there is no Metal here; kernels for the few rows of a verification are for Macs"
    assert ask_metal_kernels("nowhere", "auto") == MetalKernelsReport(note=note)
    pair = Pair(model="nowhere", draft_model="", backend="ngram")
    found = doctor._examine_kernels(pair, StackSettings())
    assert found == [doctor.Finding("note", "Metal kernels", note)]


def test_on_a_mac_a_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the target and the setting; what it says is shown, or what it died of."""
    asked: list[tuple[Any, ...]] = []

    def run_module(name: str, module: str, settings: str, *, timeout_s: float) -> str:
        asked.append((module, msgspec.json.decode(settings, type=MetalKernelsSettings)))
        if len(asked) > 1:
            raise RuntimeFailure("the kernel report was killed by signal 9")
        return msgspec.json.encode(_FOUND).decode()

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(metal_kernels, "run_module", run_module)
    pair = Pair(model="m", draft_model="", backend="ngram")
    found = doctor._examine_kernels(pair, StackSettings(metal_kernels="on"))
    assert [finding.level for finding in found] == ["ok"] * 5
    told = MetalKernelsSettings(model="m", kernels="on")
    assert asked == [("services.tools.metal_kernels", told)]
    killed = doctor._examine_kernels(pair, StackSettings())
    assert [(one.level, one.text) for one in killed] == [
        ("note", "the kernel report was killed by signal 9")
    ]
