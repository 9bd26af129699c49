"""`ssd mac-check`: the measurements that need a Mac, written to one file."""

import contextlib
import datetime
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil

from launch.bench.bandwidth import read_weight_bytes
from launch.bench.mac_report import TEMPERATURE, MacReport, MeasuredAnswer, lines, without_paths
from launch.doctor import ask_hardware, versions
from launch.models.coreml_facts import read_facts
from launch.models.coreml_models import find_converted, require_converted
from launch.models.hub import resolve
from launch.models.own_drafters import default_drafter
from launch.models.pair import pair_of
from launch.settings.flags import Command
from launch.settings.settings import StackSettings
from launch.stack.child import Lifeline
from launch.stack.prepared import await_prepared
from launch.stack.session import private_stack
from launch.terminal import console
from launch.workers.coreml_probe import ProbeWorker, open_probes
from launch.workers.kernel_report import ask_kernel_report
from protocol.client.client import Client
from protocol.errors import SsdError, UsageError
from protocol.jobs.coreml_probe import ProbeResult
from protocol.messages import ChatMessage, Finished, Generate, Mode, Sampling

_UNITS = ("cpu_and_ne", "cpu_only", "cpu_and_gpu")
_PROMPT = "Explain in a few sentences how a bicycle stays upright while it is moving."
_NUM_DRAFT_TOKENS, _BRANCHES = 4, 8
"""Fixed, so that drafts occur even where the planner would avoid them."""

_ONLY_ON_A_MAC = (
    "speed and placement on the Neural Engine, the GPU and the CPU under CoreML",
    "the device's numbers next to the reference runtime's",
    "how much drafting on the Neural Engine slows the target on the GPU",
    "a run on two devices, and one of a model with itself: the reference runtime is too slow",
)
_SAME_MODEL = (
    "a same-model run, and prefill through CoreML: the target has no conversion next to it; run "
    "`ssd convert --model {}` and this again"
)
_CALLS, _SOAK = 10, 200
"""Calls per second of a loop: of a measurement, and of the long run."""
_PREFILL_LOOPS = 12
"""Prompts of all lengths take at most this many times as long as a loop."""


@click.command("mac-check", cls=Command)
@click.option("--model", help="Converted draft model, or a model with its conversion next to it.")
@click.option("--target", help="Target model: folder or hub name.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("ssd-mac-check.json"),
              show_default=True, help="File to write.")  # fmt: skip
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    help="Duration of each loop; prefill takes up to 12 times as long, and 200 calls per second "
    "are made in the long run.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(model: str | None, target: str | None, out: Path, **options: Any) -> None:
    """Measure CoreML on this machine.

    Elsewhere than on a Mac it measures what it can, and lists the rest.
    """
    folder = require_converted(resolve(model) if model else default_drafter())
    pair = pair_of(StackSettings(model=target or "", draft_backend="ngram"))
    if not out.parent.is_dir():
        raise UsageError(f"--out {str(out)!r}: its folder does not exist")
    report = without_paths(_measure(folder, Path(pair.model), options))
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    if options["as_json"]:
        console.write(msgspec.json.encode(report).decode() + "\n")
    else:
        for line in lines(report):
            console.stdout().print(line, markup=False)
        console.stdout().print(f"written to {out}", markup=False)


def _measure(folder: Path, target: Path, options: dict[str, Any]) -> MacReport:
    survey = ask_hardware()
    with contextlib.closing(Lifeline()) as lifeline:
        common: dict[str, Any] = {"lifeline": lifeline, "model": str(folder)}
        converted = find_converted(target)
        probes = _probes(common, _choose_probes(str(target), converted, options))
        overlap = _overlap(common, str(target), options["seconds"]) if _on_mac() else {}
    console.stderr().print("measuring: kernels for few rows")
    kernels = ask_kernel_report(str(target), "auto", survey.device, passes=True)
    missing: list[str] = [] if _on_mac() else list(_ONLY_ON_A_MAC)
    # Self-drafting with a target of any size is only feasible on a device.
    drafter = (converted if _on_mac() else None) or folder
    settings = StackSettings(model=str(target), draft_backend="coreml", draft_model=str(drafter))
    answers: list[MeasuredAnswer] = []
    failed = ""
    try:
        for answer in _answers(settings, options["max_tokens"]):
            answers.append(answer)
    except SsdError as error:  # what was measured before is kept
        failed = str(error)
    return MacReport(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        versions=versions(),
        model=folder.name,
        package=read_facts(folder),
        weight_bytes=read_weight_bytes(str(target), survey.device),
        read_bytes_s=survey.read_bytes_s,
        probes=probes,
        overlap=overlap,
        kernels=kernels,
        answers=answers,
        stack=f"{target.name} with {drafter.name}",
        answers_failed=failed,
        not_measured=missing if converted else [*missing, _SAME_MODEL.format(target.name)],
    )


def _on_mac() -> bool:
    return sys.platform == "darwin"


def _machine() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": platform.processor(),
        "macos": platform.mac_ver()[0],
        "cores": str(psutil.cpu_count()),
        "memory_gb": f"{psutil.virtual_memory().total / 1e9:.0f}",
        "python": platform.python_version(),
    }


def _choose_probes(
    target: str, converted: Path | None, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Choose probes: injection; functions by compute unit; prompts; a long run.

    `own` is the target's own conversion, if there is one.
    """
    seconds = options["seconds"]
    calls, soak = round(_CALLS * seconds), round(_SOAK * seconds)
    probes: list[dict[str, Any]] = [
        {"kind": "injection", "target": target, "calls": calls, "half": half}
        for half in (False, True)
    ]
    for units in _UNITS if _on_mac() else ("reference",):
        probes.append({"kind": "functions", "compute_units": units, "calls": calls})
        if _on_mac():
            probes.append({"kind": "device", "compute_units": units})
    units = "cpu_and_ne" if _on_mac() else "reference"
    if converted is not None:
        prefill = {
            "kind": "prefill",
            "model": str(converted),
            "target": target,
            "seconds": _PREFILL_LOOPS * seconds,
        }
        probes.append({**prefill, "compute_units": units})
    return [*probes, {"kind": "soak", "compute_units": units, "calls": soak}]


def _probes(common: dict[str, Any], probes: list[dict[str, Any]]) -> list[ProbeResult]:
    results = []
    for probe in probes:
        console.stderr().print(
            f"measuring: {probe['kind']} {probe.get('compute_units', '')}".rstrip()
        )
        with ProbeWorker(**{**common, **probe}) as worker:
            results.append(worker.measure())
    return results


def _overlap(common: dict[str, Any], target: str, seconds: float) -> dict[str, list[ProbeResult]]:
    """Measure drafting on the Neural Engine and decoding on the GPU: each alone, then both at
    once.
    """
    loop_settings: dict[str, Any] = {"model": common["model"], "seconds": seconds}
    units = "cpu_and_ne" if _on_mac() else "reference"
    loops = (
        {**loop_settings, "kind": "draft-loop", "compute_units": units},
        {**loop_settings, "kind": "target-loop", "target": target},
    )
    console.stderr().print("measuring: overlap")
    alone = []
    for loop in loops:
        with ProbeWorker(common["lifeline"], **loop) as worker:
            alone.append(worker.measure())
    with open_probes(common["lifeline"], *loops) as both:
        return {"alone": alone, "together": [worker.measure() for worker in both]}


def _answers(settings: StackSettings, max_tokens: int) -> Iterator[MeasuredAnswer]:
    """Decode plainly and speculatively, at a temperature, on the stack that would be used."""
    console.stderr().print(f"measuring: answers at temperature {TEMPERATURE}")
    sampling = Sampling(temperature=TEMPERATURE, seed=1)
    plain: list[int] = []
    with private_stack(settings, console.process_line) as supervisor:
        client = Client(supervisor.run_dir.clients_address)
        with contextlib.closing(client):
            await_prepared(client)
            ways: tuple[tuple[Mode, int], ...] = (
                ("ar", 0), ("sd", _NUM_DRAFT_TOKENS), ("ssd", _NUM_DRAFT_TOKENS), ("ssd", 0),
            )  # fmt: skip
            for mode, num_draft_tokens in ways:
                tokens, finished = _ask(client, mode, num_draft_tokens, sampling, max_tokens)
                plain = plain or tokens
                yield _answer(mode, num_draft_tokens, tokens, finished, same=tokens == plain)


def _ask(
    client: Client, mode: Mode, num_draft_tokens: int, sampling: Sampling, max_tokens: int
) -> tuple[list[int], Finished]:
    request = Generate(
        request=client.number(),
        messages=[ChatMessage("user", _PROMPT)],
        sampling=sampling,
        max_tokens=max_tokens,
        mode=mode,
        num_draft_tokens=num_draft_tokens,
        branches=_BRANCHES if mode == "ssd" and num_draft_tokens else 0,
    )
    tokens: list[int] = []
    for message in client.generate(request):
        if isinstance(message, Finished):
            return tokens, message
        tokens += message.tokens
    raise AssertionError("an answer ends with Finished")


def _answer(
    mode: str, num_draft_tokens: int, tokens: list[int], finished: Finished, *, same: bool
) -> MeasuredAnswer:
    statistics = finished.statistics
    return MeasuredAnswer(
        mode=mode,
        num_draft_tokens=num_draft_tokens,
        tokens=len(tokens),
        tok_s=statistics.tok_s,
        accepted=statistics.accepted,
        drafted=statistics.drafted,
        cache_hits=statistics.cache_hits,
        cache_misses=statistics.cache_misses,
        same_as_plain=same,
    )
