"""`ssd distill`: a drafter for any target, trained on the target's own texts."""

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from launch.models.hub import resolve
from launch.prompts import own_prompts
from launch.settings.flags import Command, more_settings, read_more
from launch.settings.options import options_of, settings_from_flags
from launch.stack.child import Lifeline
from launch.terminal import console
from launch.workers.chat_template import form_of, tokenise
from launch.workers.worker import JsonWorker
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.errors import UsageError
from protocol.jobs.distill import (
    DistillEvent,
    DistillFinished,
    DistillNote,
    DistillProgress,
    DistillSettings,
)

_option = options_of(DistillSettings)
_LINE_EVERY_S = 10.0
MORE = (
    "steps", "temperatures", "length", "user_tokens", "data_tokens", "data_minutes",
    "data_batch", "init_layers", "head_size", "mlp", "bits", "finish",
    "loss_temperature", "user_weight", "batch", "learning_rate",
    "precision", "warmup", "weight_decay", "clip", "session_minutes",
)  # fmt: skip
"""Settings of a run without a flag: see `protocol.jobs.distill.DistillSettings`."""


@click.command("distill", cls=Command)
@click.option("--target", required=True, help="Target model: folder or hub name.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the run and the drafter.")
@click.option("--evaluate", help="Evaluate this drafter instead of training one.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSONL file: prompt, category.")
@click.option("--texts", multiple=True, help="Reuse the texts of this run (repeatable).")
@_option("--minutes", "The whole run, over all resumptions: texts, training, evaluation.")
@_option("--layers", "Layers of the drafter.")
@click.option("--init-drafter", help="Drafter to start from, of as many layers or fewer.")
@_option("--seed", "Same seed, same data and batches.")
@more_settings(MORE)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(**options: Any) -> None:
    """Train a drafter for a target, or evaluate one.

    Repeating the command resumes the run.
    """
    target = resolve(options.pop("target"))
    as_json, prompts = options.pop("as_json"), options.pop("prompts")
    values = _settings_of(options, target)
    with tempfile.TemporaryDirectory(prefix="ssd-distill-") as scratch:
        tokenizer = TargetTokenizer(target)
        if prompts is None and values["evaluate_only"] and not _has_texts(Path(values["out"])):
            prompts = own_prompts()
        if prompts is not None:
            tokenised = Path(scratch) / "prompts.jsonl"
            tokenise(prompts, tokenizer, tokenised)
            values["prompts"] = str(tokenised)
        else:
            values |= _form(tokenizer)
        values["stop_ids"] = sorted(tokenizer.stop_ids)
        finished = _run(values)
    _show(finished, as_json=as_json)


def _settings_of(options: dict[str, Any], target: Path) -> dict[str, Any]:
    """Return the values of `DistillSettings` that the command line sets."""
    evaluate, out = options.pop("evaluate"), options.pop("out")
    if (evaluate is None) == (out is None):
        raise UsageError("give either --out, to train, or --evaluate, to judge a drafter")
    options["texts"] = [str(Path(run).expanduser().resolve()) for run in options["texts"]]
    if options["init_drafter"] is not None:
        options["init_drafter"] = str(resolve(options["init_drafter"]))
    values = read_more(options.pop("more"), MORE)
    values |= {key: value for key, value in options.items() if value is not None}
    folder = resolve(evaluate) if evaluate is not None else out.expanduser().resolve()
    return values | {
        "target": str(target),
        "out": str(folder),
        "evaluate_only": evaluate is not None,
        "threads": os.cpu_count() or 1,
    }


def _has_texts(folder: Path) -> bool:
    return (folder / "run.json").is_file() and (folder / "data").is_dir()


def _form(tokenizer: TargetTokenizer) -> dict[str, Any]:
    form = form_of(tokenizer)
    if not form.turn:
        console.stderr().print("the target has no chat template: its texts start from nothing")
    return {"opening": form.opening, "turn": form.turn}


def _run(values: dict[str, Any]) -> DistillFinished:
    """Run the process, display its events, and let it save when the user interrupts."""
    with contextlib.closing(Lifeline()) as lifeline:
        settings = settings_from_flags(
            {**values, "lifeline": lifeline.child_end}, DistillSettings, MORE
        )
        with JsonWorker("distillation", "services.distill", settings) as worker, _bar() as bar:
            try:
                finished = _follow(worker, bar)
            except KeyboardInterrupt:
                worker.ask_to_stop()
                bar.console.print("saving; Ctrl-C again gives up")
                finished = _follow(worker, bar)
                if not finished.complete:
                    bar.console.print("stopped; the same command goes on from here")
                    raise
    if not finished.complete:
        console.stderr().print("stopped; the same command goes on from here")
    return finished


def _bar() -> Progress:
    err = console.stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[details]}"),
        console=err,
        disable=not err.is_terminal,
    )


def _follow(worker: JsonWorker, bar: Progress) -> DistillFinished:
    """Display all events; raise the error that the process died of."""
    tasks = {task.description: task.id for task in bar.tasks}
    silent_until = 0.0
    for event in worker.events(DistillEvent):
        match event:
            case DistillNote():
                bar.console.print(event.text)
            case DistillProgress():
                if event.phase not in tasks:
                    tasks[event.phase] = bar.add_task(event.phase, total=1.0, details="")
                    silent_until = 0.0
                details = _details(event)
                bar.update(tasks[event.phase], completed=event.done, details=details)
                if not bar.console.is_terminal and time.monotonic() > silent_until:
                    # A log has no bar: print a line from time to time.
                    bar.console.print(f"{event.phase} {event.done:.0%}, {details}")
                    silent_until = time.monotonic() + _LINE_EVERY_S
            case DistillFinished():
                pass  # `result` returns it
    return worker.result(DistillFinished)


def _details(event: DistillProgress) -> str:
    parts = [f"{event.tok_s:,.0f} tok/s"]
    if event.loss is not None:
        parts.append(f"loss {event.loss:.3f}")
    if event.acceptance is not None:
        parts.append(f"acceptance {event.acceptance:.3f}")
    left = f"{_minutes(event.seconds_left)} left"
    if event.run_seconds_left is not None:
        left += f", {_minutes(event.run_seconds_left)} of the run"
    return ", ".join([*parts, left])


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


_USELESS, _POOR = 0.2, 0.4
"""Agreement below which drafting costs more than it gains, and below which it rarely pays: of
four draft tokens .25 and .65 are accepted on average.
"""


def judge_drafter(agreement: float) -> str:
    """Return a warning for a drafter that agrees this rarely; empty if it may pay."""
    if agreement < _USELESS:
        return (
            f"USELESS: {agreement:.0%} of its tokens are the target's, so drafts would only cost "
            "time; train longer (--minutes), on more texts (--set data_minutes=N), or with more "
            "layers"
        )
    if agreement < _POOR:
        return (
            f"poor: {agreement:.0%} of its tokens are the target's; it pays only where drafting is "
            "nearly free, on another device"
        )
    return ""


def _show(finished: DistillFinished, *, as_json: bool) -> None:
    if as_json:
        console.write(
            json.dumps({"out": finished.out, "complete": finished.complete, **finished.figures})
            + "\n"
        )
        return
    figures: Any = finished.figures.get("figures")
    if figures is None:
        return
    out = console.stdout()
    out.print(f"greedy agreement {figures['greedy_agreement']:.3f}")
    if verdict := judge_drafter(figures["greedy_agreement"]):
        out.print(verdict, style="bold", markup=False)
    for name, value in figures["by_category"].items():
        out.print(f"  {name} {value:.3f}")
    for rates in figures["acceptance"]:
        out.print(
            f"acceptance at T={rates['temperature']}: coupled {rates['coupled']:.3f}, "
            f"rejection {rates['rejection']:.3f}"
        )
    for name in ("hits", "hits_after_rejection"):
        curve = " ".join(f"{width}:{value:.2f}" for width, value in figures[name].items())
        out.print(f"{name.replace('_', ' ')} by fan-out: {curve}")
    out.print(finished.out)
