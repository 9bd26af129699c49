"""Our kernels for few rows on this GPU, measured by a process with MLX, and their description."""

from collections.abc import Iterator

import msgspec

from launch.workers.worker import run_module
from protocol.errors import SsdError
from protocol.jobs.kernel_report import KernelProbe, KernelReport, KernelReportSettings
from protocol.settings import MetalKernels, encode_settings

NO_GPU = "there is no GPU here; what a CPU uses is listed under `kernels`"
_TIMEOUT_S = 120.0
_PASSES_TIMEOUT_S = 900.0
"""A large target takes minutes to load."""


def ask_kernel_report(
    model: str, kernels: MetalKernels, device: str, *, passes: bool = False
) -> KernelReport:
    """Measure with the layers of a target; otherwise return a note why nothing was measured.

    Args:
        model: the target's folder.
        kernels: the setting `metal_kernels`.
        device: MLX's device (`HardwareReport`).
        passes: also time whole passes, for which the whole target is loaded.
    """
    if device == "cpu":
        return KernelReport(note=NO_GPU)
    report_settings = KernelReportSettings(model=model, kernels=kernels, passes=passes)
    try:
        report = run_module(
            "kernel report",
            "services.tools.kernel_report",
            encode_settings(report_settings),
            timeout_s=_PASSES_TIMEOUT_S if passes else _TIMEOUT_S,
        )
    except SsdError as error:
        return KernelReport(note=str(error))
    return msgspec.json.decode(report, type=KernelReport)


def describe_kernels(report: KernelReport) -> Iterator[str]:
    """Describe the used kernels and the measurements, a line each."""
    if report.note:
        yield report.note
    for probe in report.probes:
        yield _describe(probe)
    if report.pass_ms:
        yield f"a verification of 1 to {max(report.pass_ms)} rows: {_times(report.pass_ms)}"
    if report.pass_with_kernels_ms:
        yield f"the same with every kernel that is right: {_times(report.pass_with_kernels_ms)}"


def _describe(probe: KernelProbe) -> str:
    layers = f"{probe.layers} x " if probe.layers else ""
    used = "used"
    if probe.most_rows:
        used = f"used for {probe.least_rows} to {probe.most_rows} rows"
    elif probe.least_rows > 1:
        used = f"used from {probe.least_rows} rows on"
    text = f"{probe.kernel}, {layers}{probe.shape}: {used if probe.least_rows else 'not used'}"
    if probe.reason:
        text += f", {probe.reason}"
    if probe.own_ms:
        rows = ", ".join(map(str, probe.own_ms))
        text += f"; {rows} rows take {_times(probe.own_ms)} (MLX: {_times(probe.mlx_ms)})"
    if probe.distance:
        text += f"; {probe.distance:.1g} from MLX's result"
    return text


def _times(by_rows: dict[int, float]) -> str:
    return " / ".join(f"{milliseconds:.3g}" for milliseconds in by_rows.values()) + " ms"
