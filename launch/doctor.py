"""`ssd doctor`: checks the machine, the pair, and the processes that would be started."""

import os
import platform
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import psutil

from launch.bench.bandwidth import describe_ceiling, read_weight_bytes
from launch.models.coreml_facts import conversion_in
from launch.models.coreml_models import find_converted, is_converted
from launch.models.pair import Pair, pair_of
from launch.models.recommendation import describe_schedule, plan_by_weights
from launch.models.weights import Weights, stays_packed, weights_of
from launch.settings.machine import package_versions, share_cores
from launch.settings.ranks import rank_group
from launch.settings.settings import StackSettings
from launch.workers.kernel_report import ask_kernel_report, describe_kernels
from launch.workers.layers import describe_layers
from launch.workers.worker import run_module
from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError, RuntimeFailure, SsdError, UsageError
from protocol.jobs.hardware import HardwareReport
from protocol.jobs.ranks import RankProbeResult, RankProbeSettings
from protocol.settings import encode_settings
from protocol.version import DISTRIBUTION, VERSION

Level = Literal["ok", "note", "problem"]

_PACKAGES = ("mlx", "mlx-lm", "pyzmq", "msgpack", "msgspec", "tokenizers", "coremltools")
_SURVEY_S = 120.0
_EXAMPLE_TOKENS = 4096
"""Context for which the KV is included in the memory estimate."""
_GB = 1e9
_ACCEPTANCE = 0.7
"""Assumed acceptance rate of a drafter's tokens."""


class Needs(NamedTuple):
    """Memory of one model, in bytes."""

    weights: int
    kv: int
    """KV of the example's context; a converted model's state has a fixed size."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    level: Level
    topic: str
    text: str


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings."""

    platform: str
    cores: int
    memory_bytes: int
    free_bytes: int
    versions: dict[str, str]
    """Version by package; empty if it is not installed."""
    survey: HardwareReport
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """True if a stack can be started."""
        return not any(finding.level == "problem" for finding in self.findings)


def examine(settings: StackSettings) -> DoctorReport:
    """Examine the machine; raise only if nothing can be examined at all.

    Raises:
        RuntimeFailure: MLX cannot be loaded.
    """
    survey, memory = ask_hardware(), psutil.virtual_memory()
    return DoctorReport(
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(_cores()),
        memory_bytes=memory.total,
        free_bytes=memory.available,
        versions=versions(),
        survey=survey,
        findings=[
            *_examine_machine(survey),
            *_examine_pair(settings, survey, memory.available),
            *examine_ranks(settings),
        ],
    )


def examine_ranks(settings: StackSettings) -> list[Finding]:
    """Start a group like `ssd launch`, without loading the model, and measure its links."""
    try:
        group = rank_group(settings)
        if group is None:
            return []
        probe = RankProbeSettings(
            ranks=group, model=pair_of(settings).model, device=settings.target_device
        )
        answer = run_module(
            "rank probe",
            "services.ranks.probe",
            encode_settings(probe),
            timeout_s=_SURVEY_S,
            environment=group.hosts[0].environment,
        )
    except SsdError as error:
        return [Finding("problem", "ranks", str(error))]
    result = msgspec.json.decode(answer, type=RankProbeResult)
    return _describe_ranks(result, group.backend)


def _describe_ranks(result: RankProbeResult, backend: str) -> list[Finding]:
    ranks = result.ranks
    findings = [Finding("ok", "ranks", f"{len(ranks)} over {backend}, the same versions "
                        "and the same model everywhere")]  # fmt: skip
    if result.obstacle:
        findings.append(Finding("problem", "parts", result.obstacle))
    if result.division:
        findings.append(Finding("ok", "parts", f"layers of rank 0: {result.division}"))
    if result.proposal:
        split = ",".join(map(str, result.proposal))
        text = f"--split {split} suits their memory and speed (--split auto measures anew)"
        findings.append(Finding("note", "parts", text))
    for rank in ranks:
        text = (
            f"{rank.host}: {rank.free_bytes / _GB:.1f} GB free, "
            f"reads {rank.read_bytes_s / _GB:.0f} GB/s"
        )
        findings.append(Finding("ok", f"rank {rank.rank}", text))
        after = ranks[(rank.rank + 1) % len(ranks)]
        text = (
            f"from {rank.host} to {after.host}: {rank.latency_ms:.2f} ms, "
            f"{rank.mbytes_per_s:.0f} MB/s"
        )
        findings.append(Finding("ok", f"link {rank.rank}", text))
    return findings


def ask_hardware() -> HardwareReport:
    """Ask a process with MLX for the hardware; raise RuntimeFailure if it fails."""
    try:
        report = run_module("hardware report", "services.tools.hardware", timeout_s=_SURVEY_S)
    except SsdError as error:
        raise RuntimeFailure(f"MLX does not start: {error}") from error
    return msgspec.json.decode(report, type=HardwareReport)


def versions() -> dict[str, str]:
    """Return the versions of relevant packages; empty if one is not installed."""
    return {DISTRIBUTION: VERSION, **package_versions(_PACKAGES)}


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _examine_machine(survey: HardwareReport) -> list[Finding]:
    findings = [Finding("ok", "device", f"MLX {survey.mlx} computes on {_device(survey)}")]
    if survey.device == "cpu":
        slow = "CPU kernels" not in survey.matrix_kernels and sys.platform == "linux"
        advice = "; install the extra 'cpu' and a C compiler" if slow else ""
        text = f"matrix products by {survey.matrix_kernels}{advice}"
        findings.append(Finding("note" if slow else "ok", "kernels", text))
        if len(_cores()) < 2:
            text = "one core: target and drafter take turns, so speculation will rarely pay"
            findings.append(Finding("note", "cores", text))
    allowed = ", ".join(f"{what} {share:.1g}" for what, share in survey.tolerances.items())
    text = f"whatever differs from the usual result by a larger share is not used: {allowed}"
    findings.append(Finding("ok", "self-tests", text))
    if sys.platform == "darwin" and not survey.coreml:
        text = "coremltools is not installed: no drafts on the Neural Engine (extra 'coreml')"
        findings.append(Finding("note", "Neural Engine", text))
    elif sys.platform == "darwin":
        units = ", ".join(survey.coreml_units) or "what it does not say"
        text = f"coremltools {survey.coreml} reaches {units}; `ssd mac-check` measures them"
        findings.append(Finding("ok", "Neural Engine", text))
    else:
        stand_in = "; converted models run on the reference runtime, a slow test instrument"
        text = "none here; it needs a Mac" + (stand_in if survey.coreml else "")
        findings.append(Finding("note", "Neural Engine", text))
    return findings


def _device(survey: HardwareReport) -> str:
    many = f"{survey.devices} x " if survey.devices > 1 else ""
    memory = survey.device_memory_bytes
    return f"{survey.device} ({many}{survey.device_name}" + (
        f", {memory / _GB:.0f} GB)" if memory else ")"
    )


def _examine_pair(settings: StackSettings, survey: HardwareReport, free: int) -> list[Finding]:
    try:
        pair = pair_of(settings)
    except SsdError as error:
        return [Finding("problem", "pair", str(error))]
    findings, needs = [], list[Needs]()
    for role, folder in (("target", pair.model), ("drafter", pair.draft_model)):
        if not folder:
            continue
        try:
            text, need = _examine_model(Path(folder), survey)
        except ModelError as error:
            findings.append(Finding("problem", role, str(error)))
            continue
        needs.append(need)
        findings.append(Finding("ok", role, text))
    if any(finding.level == "problem" for finding in findings):
        return findings
    needs[0] = _needs_here(needs[0], settings)
    return [
        *findings,
        _check_layers(pair),
        *_examine_kernels(pair, settings, survey),
        *_check_conversions(pair),
        *_check_vocabulary(pair),
        _check_memory(needs, survey, free),
        *_examine_reading(pair, survey),
        *_examine_schedule(pair, survey),
        _check_stack(pair, survey),
    ]


def _examine_reading(pair: Pair, survey: HardwareReport) -> list[Finding]:
    """Report the rate of reading weights, and its meaning for the target."""
    text = describe_ceiling(read_weight_bytes(pair.model, survey.device), survey.read_bytes_s)
    return [Finding("ok", "reading", text)] if text else []


def _examine_schedule(pair: Pair, survey: HardwareReport) -> list[Finding]:
    """Report what drafting can gain, by the weights that a pass of either model reads."""
    target = read_weight_bytes(pair.model, survey.device)
    drafter = 0
    if pair.backend == "mlx":
        drafter = read_weight_bytes(pair.draft_model, survey.device, drafts=True)
    if not (target and drafter):
        return []
    shares = survey.device == "cpu" or survey.devices < 2
    schedule = plan_by_weights(drafter / target, _ACCEPTANCE, shares=shares)
    level: Level = "note" if schedule.way == "plain" else "ok"
    return [Finding(level, "schedule", describe_schedule(schedule, shares=shares))]


def _needs_here(target: Needs, settings: StackSettings) -> Needs:
    """Return the memory of a target spread over ranks on this machine, or on each of its GPUs."""
    try:
        group = rank_group(settings)
    except UsageError:
        return target  # `examine_ranks` reports it
    if group is None:
        return target
    here = sum(host.is_local for host in group.hosts) if group.backend != "nccl" else 1
    return Needs(*(part * here // len(group.hosts) for part in target))


def _examine_model(folder: Path, survey: HardwareReport) -> tuple[str, Needs]:
    """Describe a model and its memory; raise ModelError if it cannot be read."""
    if is_converted(folder):
        conversion = conversion_in(folder)
        return conversion.text, Needs(conversion.weight_bytes, conversion.state_bytes)
    size = weights_of(folder)
    kv = size.kv_bytes_on(survey.device) * _EXAMPLE_TOKENS
    text = _describe(folder, size)
    if survey.device == "cpu":
        packed = "CPU kernels" in survey.matrix_kernels and stays_packed(size.architecture)
        text += (
            f", {'in the bits of its file by our CPU kernels' if packed else 'in float32 by MLX'}"
        )
    return text, Needs(size.bytes_on(survey.device), kv)


def _check_layers(pair: Pair) -> Finding:
    """Report how the target rolls back a rejected draft."""
    report = describe_layers(pair.model)
    if report.misfit:
        return Finding("problem", "layers", report.misfit)
    return Finding("ok", "layers", report.rewinding)


def _examine_kernels(pair: Pair, settings: StackSettings, survey: HardwareReport) -> list[Finding]:
    """Report our kernels for few rows on a GPU: their use, and the measurements."""
    report = ask_kernel_report(pair.model, settings.metal_kernels, survey.device)
    level: Level = "note" if report.note else "ok"
    return [Finding(level, "GPU kernels", text) for text in describe_kernels(report)]


def _check_conversions(pair: Pair) -> list[Finding]:
    """Report the CoreML conversions next to the models."""
    uses = {pair.model: "`--set prefill=coreml`", pair.draft_model: "`--draft-backend coreml`"}
    findings = []
    for folder, use in uses.items():
        place = find_converted(Path(folder)) if folder else None
        if place is None or str(place) == folder:
            continue
        try:
            finding = Finding("ok", "converted", f"{conversion_in(place).text}; for {use}")
        except ModelError as error:
            finding = Finding("note", "converted", f"{error}; convert again")
        findings.append(finding)
    return findings


def _describe(folder: Path, size: Weights) -> str:
    context = f", context {size.context_length}" if size.context_length else ""
    return f"{folder}: {size.architecture}, {size.parameters / 1e6:.0f} M parameters{context}"


def _check_vocabulary(pair: Pair) -> list[Finding]:
    if not pair.draft_model:
        return []
    if pair.backend == "head":
        return [Finding("ok", "pair", "the head was made for a target of this shape")]
    try:
        prints = {read_vocabulary(Path(f)).fingerprint for f in (pair.model, pair.draft_model)}
    except ModelError as error:
        return [Finding("problem", "pair", str(error))]
    if len(prints) > 1:
        text = "target and drafter have different tokenizers; a drafter must share the target's"
        return [Finding("problem", "pair", text)]
    return [Finding("ok", "pair", "target and drafter share their vocabulary")]


def _check_memory(needs: list[Needs], survey: HardwareReport, free: int) -> Finding:
    weights = sum(need.weights for need in needs)
    kv = sum(need.kv for need in needs)
    apart = survey.device == "cuda" and survey.device_memory_bytes
    room = survey.device_memory_bytes if apart else free
    text = (
        f"weights {weights / _GB:.2f} GB, KV of {_EXAMPLE_TOKENS} tokens {kv / _GB:.2f} GB; "
        f"{room / _GB:.1f} GB {'on the device' if apart else 'free'}"
    )
    return Finding("ok" if weights + kv < room else "problem", "memory", text)


def _check_stack(pair: Pair, survey: HardwareReport) -> Finding:
    cores = share_cores(pair.backend)
    where = f" on cores {cores.verifier} and {cores.drafter}" if survey.device == "cpu" else ""
    drafts = f"drafter ({pair.backend})" if pair.has_drafter else "prompt lookup"
    text = f"target and {drafts}{where}, and an orchestrator"
    shared = pair.backend in {"mlx", "head"} and survey.device != "cpu" and survey.devices < 2
    if shared:
        text += "; both models on one device take turns: ngram or the Neural Engine overlap"
    return Finding("note" if shared else "ok", "stack", text)
