"""`ssd bench`: compare the modes on this machine."""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launch.bench import tables
from launch.bench.headline import describe_reading, headline
from launch.bench.mac_report import format_probe
from launch.bench.result import BenchFile
from launch.bench.run import BenchConfig, measure
from launch.bench.runs import require_lossless, verdict
from launch.bench.variant import NAMES, default_modes, parse_all, require_draft_model
from launch.models.coreml_models import find_converted
from launch.models.pair import Pair, pair_of
from launch.prompts import Prompt, chosen_prompts
from launch.settings.flags import Command
from launch.settings.options import sampling_options, settings_of, stack_options
from launch.settings.sampling import take_sampling
from launch.stack.child import Lifeline
from launch.terminal import console
from launch.workers.coreml_probe import ProbeWorker
from protocol.errors import UsageError
from protocol.messages import Sampling
from protocol.validation import describe
from protocol.version import install_hint


@click.command("bench", cls=Command)
@stack_options()
@sampling_options(measures=True)
@click.option("--temps", help="Several temperatures (0,0.7) instead of --temp.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSONL file: id, prompt, category; else eleven built-in ones.",
)
@click.option("--prompt", multiple=True, help="Use this prompt; may be repeated.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=0,
    help="Use only N of them, evenly spread; 0: all.",
)
@click.option("-m", "--max-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--modes",
    show_default=",".join(NAMES),
    help="all, or a list. Knobs may be fixed, as in ssd:k=4:b=16, ssd:tree-nodes=8, ssd:rejection, "
    "ssd:drafter=MODEL, mlx-lm-draft:k=5.",
)
@click.option(
    "--only",
    type=click.Choice(["profile", "overlap", "coreml"]),
    help="Predict the gain here, in half a minute; or measure whether both models can run at once; "
    "or the pair's converted models.",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write all figures as JSON."
)
@click.option("--report", type=click.Path(path_type=Path), help="Write a page with plots.")
def command(**options: Any) -> None:  # fmt: skip
    """Compare modes side by side; none may change a token.

    --report adds the profile and the overlap.
    """
    json_file, report = options.pop("json_file"), options.pop("report")
    only = options.pop("only")
    if only == "coreml":
        _measure_coreml(_config(options, only).pair, json_file)
        return
    write = None if report is None else _writer()
    config = _config(options, "everything" if report is not None else only)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console.stderr(), transient=True) as progress:
        result = measure(config, partial(_bars, progress))
    _show(result)
    for sentence in headline(result):
        console.stdout().print(sentence, style="bold", markup=False)
    if reading := describe_reading(result):
        console.stdout().print(reading, markup=False)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    if write is not None and report is not None:
        write(result, report)
    require_lossless(result.checks)
    if config.runs:
        console.stdout().print(verdict(result.checks), markup=False)


def _measure_coreml(pair: Pair, json_file: Path | None) -> None:
    """Measure each converted model of the pair: its functions, and prompts."""
    models = [Path(folder) for folder in (pair.model, pair.draft_model) if folder]
    converted = [(folder, package) for folder in models if (package := find_converted(folder))]
    if not converted:
        raise UsageError("neither model is converted; `ssd convert --model MODEL` does that")
    units = "cpu_and_ne" if sys.platform == "darwin" else "reference"
    results = []
    with contextlib.closing(Lifeline()) as lifeline:
        for folder, package in converted:
            console.stdout().print(package.name, style="bold", markup=False)
            common: dict[str, Any] = {"model": str(package), "compute_units": units}
            kinds: list[dict[str, Any]] = [{"kind": "functions"}]
            if package != folder:  # MLX can compute the same prompts from the original
                kinds.append({"kind": "prefill", "target": str(folder), "seconds": _PREFILL_S})
            for kind in kinds:
                with ProbeWorker(lifeline, **common, **kind) as worker:
                    results.append(worker.measure())
                for line in format_probe(results[-1]):
                    console.stdout().print(f"  {line}", markup=False)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


_PREFILL_S = 30.0
"""Once this time is spent, the next longer prompt is not started."""


def _writer() -> Callable[[BenchFile, Path], None]:
    """Return the writer of the page; called first, so that a missing package fails at once."""
    try:
        from launch.bench.report import write  # noqa: PLC0415  # plots are slow to import
    except ModuleNotFoundError as error:
        raise UsageError(f"--report needs matplotlib: {install_hint('report')}") from error
    return write


def _config(options: dict[str, Any], only: str | None) -> BenchConfig:
    """Return what to measure: `only` the profile or the overlap, everything, or the modes."""
    modes, every_mode = options.pop("modes"), ",".join(NAMES)
    modes = every_mode if modes == "all" else modes
    variants = parse_all(modes or every_mode)
    sampling = take_sampling(options)
    if sampling.logits_options is not None:
        raise UsageError(
            "penalties and schemas cannot be benchmarked, since mlx-lm's differ; leave them out"
        )
    samplings = _samplings(options.pop("temps"), sampling)
    for variant in variants:
        for sampling in samplings:
            variant.sampling(sampling)
    prompts, source = _take_prompts(options)
    counts = {name: options.pop(name) for name in ("max_tokens", "repeats")}
    # Otherwise every mode after the first would find the prompts' KV, and start sooner.
    options["prompt_cache_size"] = options["prompt_cache_size"] or 0
    settings = settings_of(**options)
    pair = pair_of(settings)
    runs = only in (None, "everything")
    if modes is None:
        variants = parse_all(default_modes(pair.backend))
        if pair.backend != "mlx" and runs:
            console.stderr().print(f"no mlx-lm-draft: it cannot draft with {pair.backend}")
    require_draft_model(variants, pair.backend)
    for name in dict.fromkeys(variant.drafter for variant in variants if variant.drafter):
        pair_of(msgspec.structs.replace(settings, draft_model=name))  # checked above
    return BenchConfig(
        settings=settings,
        pair=pair,
        variants=variants,
        samplings=samplings,
        prompts=prompts,
        source=source,
        profile=only in ("profile", "everything"),
        overlap=only in ("overlap", "everything"),
        runs=runs,
        **counts,
    )


def _take_prompts(options: dict[str, Any]) -> tuple[list[Prompt], str]:
    """Return the prompts, and their source."""
    file, texts, limit = options.pop("prompts"), options.pop("prompt"), options.pop("limit")
    if not texts:
        return chosen_prompts(file, limit), str(file or "our own eleven")
    if file is not None:
        raise UsageError("give either --prompt or --prompts")
    return [Prompt(text, id=number) for number, text in enumerate(texts, start=1)], "--prompt"


def _samplings(temps: str | None, sampling: Sampling) -> tuple[Sampling, ...]:
    if temps is None:
        return (sampling,)
    try:
        temperatures = [float(part) for part in temps.split(",")]
        return tuple(
            msgspec.convert({**msgspec.structs.asdict(sampling), "temperature": t}, Sampling)
            for t in dict.fromkeys(temperatures)
        )
    except msgspec.ValidationError as error:
        raise UsageError(f"--temps {temps!r}: {describe(error)}") from error
    except ValueError as error:
        raise UsageError(f"--temps {temps!r}: {error}") from error


def _bars(progress: Progress, steps: int) -> Callable[[str], None]:
    """Show a progress bar with this many steps, in place of the previous one."""
    for old in progress.task_ids:
        progress.remove_task(old)
    task = progress.add_task("", total=steps)

    def step(what: str) -> None:
        progress.update(task, advance=1, description=what)

    return step


def _show(result: BenchFile) -> None:
    out = console.stdout()
    if result.profile is not None:
        out.print(tables.profile(result.profile))
    if result.overlap is not None:
        out.print(tables.overlap(result.overlap))
    if result.runs:
        out.print(tables.speeds(result))
        out.print(tables.LEGEND, markup=False)
        out.print(tables.prompts(result))
        out.print(tables.phases(result))
        out.print(tables.drafting(result))
        out.print(tables.memory(result), markup=False)
        cold = result.cold_start
        out.print(
            f"cold start: ready after {cold['ready_s']:.1f} s, "
            f"first token {cold['first_token_s']:.2f} s later, "
            f"prepared after {cold['prepared_s']:.1f} s"
        )
