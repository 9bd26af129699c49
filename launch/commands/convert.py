"""`ssd convert`: converts a model to a CoreML package and compares the two."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from launch.models.coreml_facts import source_of
from launch.models.coreml_models import default_conversion_dir
from launch.models.hub import resolve
from launch.prompts import own_prompts
from launch.settings.flags import Command, more_settings, read_more
from launch.settings.machine import compute_threads
from launch.settings.options import settings_from_flags
from launch.stack.child import Lifeline
from launch.terminal import console
from launch.workers.chat_template import tokenise
from launch.workers.worker import JsonWorker
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.errors import UsageError
from protocol.jobs.convert import (
    Agreement,
    ConvertEvent,
    ConvertProgress,
    ConvertResult,
    ConvertSettings,
)

MORE = (
    "branches",
    "chunk",
    "compression",
    "compute_units",
    "context",
    "width",
    "layers_per_part",
    "state_write",
    "threshold",
    "tokens",
    "all_routes",
)
"""Settings of a conversion without a flag: `protocol.jobs.convert.ConvertSettings`."""


@click.command("convert", cls=Command)
@click.option("--model", required=True, help="Llama-type model: folder or hub name.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Output folder.  [default: MODEL-coreml]"
)
@click.option("--target", help="Target to draft for; also measures acceptance.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSONL file: prompt, category.")
@more_settings(MORE)
@click.option("--force", is_flag=True, help="Replace the conversion of another model.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(model: str, out: Path | None, target: str | None, **options: Any) -> None:
    """Convert a model to CoreML and compare the result with it."""
    folder = resolve(model)
    place = default_conversion_dir(folder) if out is None else out.expanduser().resolve()
    if not options.pop("force"):
        _require_own(place, folder)
    as_json, prompts = options.pop("as_json"), options.pop("prompts")
    if prompts is None:
        prompts = own_prompts()
    with tempfile.TemporaryDirectory(prefix="ssd-convert-") as scratch:
        tokenised = Path(scratch) / "prompts.jsonl"
        tokenise(prompts, TargetTokenizer(folder), tokenised)
        values = (
            read_more(options.pop("more"), MORE)
            | options
            | {
                "model": str(folder),
                "out": str(place),
                "target": "" if target is None else str(resolve(target)),
                "prompts": str(tokenised),
                "threads": compute_threads(),
            }
        )
        converted = _run(values)
    if as_json:
        console.write(msgspec.json.encode(converted).decode() + "\n")
    else:
        _show(converted)


def _require_own(place: Path, folder: Path) -> None:
    """Raise UsageError if `place` holds the conversion of a model other than `folder`."""
    source = source_of(place)
    if source is not None and source != folder:
        raise UsageError(
            f"{str(place)!r} holds the conversion of {str(source)!r}: name another --out, "
            "or give --force to replace it"
        )


def _run(values: dict[str, Any]) -> ConvertResult:
    with contextlib.closing(Lifeline()) as lifeline:
        settings = settings_from_flags(
            {**values, "lifeline": lifeline.child_end}, ConvertSettings, MORE
        )
        err = console.stderr()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        bar = Progress(*columns, console=err, disable=not err.is_terminal)
        with JsonWorker("conversion", "services.coreml", settings) as worker, bar:
            return _follow(worker, bar)


def _follow(worker: JsonWorker, bar: Progress) -> ConvertResult:
    """Display all events; raise the error that the process died of."""
    task = bar.add_task("reading", total=1.0)
    printed = ""
    for event in worker.events(ConvertEvent):
        if isinstance(event, ConvertProgress):
            bar.update(task, description=event.what, completed=event.done)
            if not bar.console.is_terminal and event.what != printed:
                bar.console.print(event.what)
                printed = event.what
    return worker.result(ConvertResult)


def _show(converted: ConvertResult) -> None:
    out = console.stdout()
    out.print(f"{converted.out}: {converted.megabytes:.0f} MB in {converted.seconds:.0f} s")
    agreed = converted.agreement
    if agreed is None:
        out.print("not compared with the model")
        return
    out.print(_format_agreement(agreed))
    for route, agreement in converted.routes.items():
        out.print(f"by {route}: {_format_agreement(agreement)}")
        for apart in agreement.differences:
            out.print(
                f"  position {apart.position}: token {apart.package}, the model's {apart.model} "
                f"has a margin of {apart.margin:.4f}"
            )
    if converted.draft is not None and converted.model is not None:
        out.print(
            f"the target accepts, greedily {converted.draft.greedy:.3f} "
            f"(the model itself {converted.model.greedy:.3f}), at T=1 "
            f"{converted.draft.sampled:.3f} ({converted.model.sampled:.3f})"
        )
    for cost in converted.costs:
        out.print(f"  {cost.name}: {cost.call_ms:.1f} ms a call, on {cost.unit}")
        if cost.off_ane:
            out.print(f"    not on the Neural Engine: {cost.off_ane}")
    if converted.compute_unit == "reference":
        out.print("  the reference runtime is a test instrument: no times of CoreML")


def _format_agreement(agreed: Agreement) -> str:
    return (
        f"best token equal on {agreed.greedy:.3f} of {agreed.tokens - agreed.ties} tokens "
        f"({agreed.greedy_with_ties:.3f} with {agreed.ties} ties; largest margin of a difference "
        f"{agreed.worst_margin:.3f}), top 8 {agreed.top8:.3f}, KL {agreed.kl:.5f}"
    )
