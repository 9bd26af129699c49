"""`ssd mac-check`: everything that only a Mac can show, measured and written to one file."""

import contextlib
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil

from launch import show
from launch.config import StackSettings
from launch.converted import require_converted
from launch.models import default_drafter, pair_of, resolve
from launch.probing import probe
from launch.process import Lifeline
from launch.session import private_stack
from protocol.client import Client
from protocol.messages import ChatMessage, Finished, Generate, Mode, Sampling
from protocol.probing import Found

_UNITS = ("cpu_and_ne", "cpu_only", "cpu_and_gpu")
_PROMPT = "Explain in a few sentences how a bicycle stays upright while it is moving."
_TEMPERATURE = 0.8

_ONLY_ON_A_MAC = (
    "speed and placement on the Neural Engine, the GPU and the CPU under CoreML",
    "the device's numbers beside the reference runtime's",
    "how much drafting on the Neural Engine slows the target on the GPU",
    "a same-model SSD run on two devices",
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a stack."""

    mode: str
    tokens: int
    tok_s: float
    accepted: int
    drafted: int
    cache_hits: int
    cache_misses: int
    same_as_plain: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The file that a user can attach to a report."""

    format: int = 1
    machine: dict[str, str]
    model: str
    probes: list[Found] = []
    overlap: dict[str, list[Found]] = {}
    """"alone": draft and target loop one after the other; "together": at the same time."""
    answers: list[Answer] = []
    same_model: str = ""
    """The stack of `answers`."""
    not_measured: list[str] = []


@click.command("mac-check")
@click.option("--model", help="A converted draft model, or one with its conversion beside it.")
@click.option("--target", help="Target: model folder or hub name.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("ssd-mac-check.json"),
              show_default=True, help="The file to write.")  # fmt: skip
@click.option("--calls", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Of each loop.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(model: str | None, target: str | None, out: Path, **options: Any) -> None:
    """Measure what CoreML does on this machine; on others, what can be measured there."""
    folder = require_converted(resolve(model) if model else default_drafter())
    pair = pair_of(StackSettings(model=target or "", draft_backend="ngram"))
    with contextlib.closing(Lifeline()) as lifeline:
        common: dict[str, Any] = {"lifeline": lifeline, "model": str(folder)}
        probes = _probes(common, options["calls"])
        overlap = _overlap(common, pair.model, options["seconds"]) if _on_mac() else {}
    settings = StackSettings(
        model=pair.model, draft_backend="coreml", draft_model=_same_model(pair.model, folder)
    )
    report = Report(
        machine=_machine(),
        model=str(folder),
        probes=probes,
        overlap=overlap,
        answers=_answers(settings, options["max_tokens"]),
        same_model=f"{settings.model} with {settings.draft_model}",
        not_measured=[] if _on_mac() else list(_ONLY_ON_A_MAC),
    )
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    if options["as_json"]:
        show.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(report, out)


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


def _probes(common: dict[str, Any], calls: int) -> list[Found]:
    """Functions by compute unit, the device beside the reference, injection."""
    wanted: list[dict[str, Any]] = [{"kind": "injection", "calls": calls}]
    for units in _UNITS if _on_mac() else ("reference",):
        wanted.append({"kind": "functions", "compute_units": units, "calls": calls})
        if _on_mac():
            wanted.append({"kind": "device", "compute_units": units})
    found = []
    for told in wanted:
        show.human().print(f"measuring: {told['kind']} {told.get('compute_units', '')}")
        with probe(**common, **told) as one:
            found.append(one.found())
    return found


def _overlap(common: dict[str, Any], target: str, seconds: float) -> dict[str, list[Found]]:
    """Drafting on the Neural Engine and decoding on the GPU: each alone, then both at once."""
    draft = {**common, "kind": "draft-loop", "compute_units": "cpu_and_ne", "seconds": seconds}
    decode = {**common, "kind": "target-loop", "target": target, "seconds": seconds}
    show.human().print("measuring: overlap")
    alone = []
    for told in (draft, decode):
        with probe(**told) as one:
            alone.append(one.found())
    with probe(**draft) as first, probe(**decode) as second:
        together = [first.found(), second.found()]
    return {"alone": alone, "together": together}


def _same_model(target: str, drafter: Path) -> str:
    """The target's own conversion if there is one: both models are then the same."""
    own = Path(target).with_name(f"{Path(target).name}-coreml")
    return str(own if own.is_dir() else drafter)


def _answers(settings: StackSettings, max_tokens: int) -> list[Answer]:
    """Plain and speculative, at a temperature, on the stack that would be used."""
    show.human().print(f"measuring: answers at temperature {_TEMPERATURE}")
    sampling = Sampling(temperature=_TEMPERATURE, seed=1)
    answers: list[Answer] = []
    plain: list[int] = []
    with private_stack(settings, show.process_line) as supervisor:
        client = Client(supervisor.run_dir.clients_address)
        with contextlib.closing(client):
            modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
            for mode in modes:
                tokens, finished = _ask(client, mode, sampling, max_tokens)
                plain = plain or tokens
                answers.append(_answer(mode, tokens, finished, same=tokens == plain))
    return answers


def _ask(
    client: Client, mode: Mode, sampling: Sampling, max_tokens: int
) -> tuple[list[int], Finished]:
    request = Generate(
        request=client.number(),
        messages=[ChatMessage("user", _PROMPT)],
        sampling=sampling,
        max_tokens=max_tokens,
        mode=mode,
    )
    tokens: list[int] = []
    for message in client.generate(request):
        if isinstance(message, Finished):
            return tokens, message
        tokens += message.tokens
    raise AssertionError("an answer ends with Finished")


def _answer(mode: str, tokens: list[int], finished: Finished, *, same: bool) -> Answer:
    statistics = finished.statistics
    return Answer(
        mode=mode,
        tokens=len(tokens),
        tok_s=statistics.tok_s,
        accepted=statistics.accepted,
        drafted=statistics.drafted,
        cache_hits=statistics.cache_hits,
        cache_misses=statistics.cache_misses,
        same_as_plain=same,
    )


def _show(report: Report, out: Path) -> None:
    line: Callable[..., None] = show.plain().print
    line(f"{report.model} on {report.machine['system']}, {time.strftime('%Y-%m-%d')}")
    for found in report.probes:
        if found.failed:
            line(f"{found.kind} {found.compute_units}: no figure, {found.failed}")
            continue
        match found.kind:
            case "functions":
                for cost in found.costs:
                    line(f"{found.compute_units} {cost.name}: {cost.call_ms:.1f} ms on {cost.unit}")
            case "device":
                line(
                    f"{found.compute_units}: best token of the reference on "
                    f"{found.same_best:.3f}, worst logit {found.worst_logit:.3f}"
                )
            case _:
                line(f"injection of {found.tokens} tokens: {found.milliseconds:.2f} ms")
    for when, loops in report.overlap.items():
        for loop in loops:
            line(f"{when}: {loop.kind} {loop.per_second:.1f} a second on {loop.compute_unit}")
    for answer in report.answers:
        line(
            f"{answer.mode} at T={_TEMPERATURE}: {answer.tok_s:.1f} tok/s, "
            f"{answer.accepted} of {answer.drafted} accepted, "
            f"{'same' if answer.same_as_plain else 'OTHER'} tokens as plain decoding"
        )
    for what in report.not_measured:
        line(f"not measured here: {what}")
    line(f"written to {out}")
