"""`ssd models`: models on this machine, and recommended pairs."""

import shutil
import sys
from pathlib import Path

import click
import msgspec
import psutil
from rich.table import Table
from rich.text import Text

from launch.models.catalog import (
    Fit,
    Model,
    add_folder,
    find_model,
    list_models,
    own_model,
    pairs,
    remove,
)
from launch.models.deviations import describe_inexact, read_deviations
from launch.models.gguf_models import (
    convert_once,
    find_named,
    is_gguf,
)
from launch.models.hub import download
from launch.models.own_drafters import DEFAULT
from launch.models.recommendation import PURPOSES, Purpose, Recommendation, recommend
from launch.models.registry import add_known, read_registry
from launch.models.weights import bytes_of_kv, bytes_on_cpu
from launch.settings.flags import Group
from launch.settings.machine import compute_threads
from launch.terminal import console
from launch.terminal.dashboard import format_bytes
from launch.workers.layers import describe_layers
from protocol.errors import UsageError

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group("models", cls=Group)
def command() -> None:
    """List, fetch, inspect and recommend models."""


@command.command("add")
@click.argument("model")
@click.option("--name", help="Of a folder or file: what --model will call it; else its own name.")
def add(model: str, name: str | None) -> None:
    """Set up a model that we know, or give a folder or a GGUF file a name.

    `default` is SmolLM2-135M-Instruct and `coder` Qwen2.5-Coder 1.5B, each with a drafter made
    for it; `coder-draft` is Qwen2.5-Coder 0.5B, `gemma3-270m` is Gemma 3 270M. What is there
    already is kept. A folder or a GGUF file stays where it is; a file is converted.
    """
    registry = read_registry()
    if model == DEFAULT or model in registry:
        with console.bytes_bar() as report:
            licence = add_known(model, report).licence
        console.note(f"--model {model} is ready; licence: {licence}")
        return
    path = Path(model).expanduser()
    file = path if is_gguf(path) else find_named(model)
    if file is None and not path.is_dir():
        raise UsageError(
            f"{model!r} is neither {DEFAULT!r}, {', '.join(map(repr, registry))}, nor a model "
            "folder or a GGUF file; `ssd models pull OWNER/NAME` fetches a model from the hub"
        )
    name = name or (path.resolve().name if file is None else path.stem)
    folder = convert_once(file) if file is not None else path
    add_folder(folder, name)
    console.note(f"--model {name} is now {folder.resolve()}")


@command.command("rm")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm(name: str, *, yes: bool) -> None:
    """Remove a model from ssd's cache.

    Of a folder that was given a name, only the name is removed.
    """
    own_model(name)
    if not yes:
        click.confirm(f"remove the model {name!r}?", abort=True, err=True)
    console.note(f"removed {remove(name)}")


@command.command("list")
@_JSON
def list_(*, as_json: bool) -> None:
    """List models on this machine and the pairs they make.

    It looks into the caches of ssd (~/.cache/ssd) and of Hugging Face (HF_HOME), and into the
    folders of LM Studio and Ollama (OLLAMA_MODELS), whose files stay as they are. A pair
    shares its tokenizer, and its drafter has at most half of the target's parameters.
    """
    models = list_models()
    fits = pairs(models)
    if as_json:
        _print({"models": models, "pairs": fits})
        return
    if not models:
        console.stdout().print("no models here yet; `ssd models add default` sets up a small pair")
        return
    console.stdout().print(_models_table(models))
    for model in models:
        if model.problem:
            console.stderr().print(f"{model.name}: {model.problem}", markup=False)
    if fits:
        console.stdout().print(_pairs_table(fits))


@command.command("inspect")
@click.argument("model")
@_JSON
def inspect(model: str, *, as_json: bool) -> None:
    """Show a model's architecture and the memory it needs.

    Architecture, parameters, context, vocabulary, quantisation, memory. MODEL is a
    folder, or a name that `ssd models list` shows. Only the heads of its files are read.
    """
    description = find_model(model)
    layers = describe_layers(description.folder)
    deviations = read_deviations(Path(description.folder))
    if as_json:
        more = {"layers": layers.misfit or layers.rewinding, "deviations": deviations}
        _print({**msgspec.to_builtins(description), **msgspec.to_builtins(more)})
    else:
        card = _card(description)
        card.add_row("layers", layers.misfit or layers.rewinding)
        for deviation in deviations:
            card.add_row("not exact", describe_inexact(deviation))
        console.stdout().print(card)


@command.command("pull")
@click.argument("name")
@_JSON
def pull(name: str, *, as_json: bool) -> None:
    """Fetch a model from the Hugging Face hub.

    NAME is OWNER/NAME; it goes into the hub's own cache. Weights, configuration,
    tokenizer and chat template; a download that broke off goes on where it ended.
    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they mean elsewhere.
    """
    folder = download(name)
    console.stderr().print(f"{name} is at {folder}", markup=False)
    description = find_model(str(folder))
    if as_json:
        _print(description)
    else:
        console.stdout().print(_card(description))


@command.command("recommend")
@click.option("--purpose", type=click.Choice(PURPOSES), help="Only pairs for this purpose.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Memory in GB; else this machine's.",
)
@_JSON
def recommend_(purpose: Purpose | None, memory: float | None, *, as_json: bool) -> None:
    """Recommend pairs by memory and purpose.

    Memory counts the weights as stored and the KV of a context of 8192 tokens.
    Expectations are assumptions, not measurements of this project, except where a pair is
    marked as measured: a rate at which drafts are accepted, and the tokens per round that
    follow from it with 4 draft tokens, which is also the most that speculation could gain.
    `ssd bench` measures what it gains here.
    """
    total = round(memory * 1e9) if memory else psutil.virtual_memory().total
    pairs = recommend(total, purpose, cpu_cores=0 if memory else _computing_cores())
    if as_json:
        _print({"memory_bytes": total, "pairs": pairs})
        return
    for entry in pairs:
        console.stdout().print(_format_recommendation(entry))
    console.stdout().print(
        f"For {format_bytes(total)} of memory. Expected, not measured, except for pairs that "
        "are marked: tokens per round are the most that speculation could gain, if the assumed "
        "share of drafts is accepted."
    )


def _computing_cores() -> int:
    """Return the number of computing cores on a machine without a GPU; 0 with one."""
    has_gpu = sys.platform == "darwin" or shutil.which("nvidia-smi") is not None
    return 0 if has_gpu else compute_threads()


def _print(value: object) -> None:
    console.write(msgspec.json.encode(value).decode() + "\n")


def _models_table(models: list[Model]) -> Table:
    table = _table("model", "architecture", ">parameters", ">context", ">disk", "vocabulary")
    for m in models:
        kind = f"{m.architecture} ({m.quantization})" if m.quantization else m.architecture
        count, context = _billions(m.parameters), str(m.context_length or "-")
        table.add_row(
            m.name, kind or "-", count, context, format_bytes(m.disk_bytes), m.vocabulary[:8] or "-"
        )
    return table


def _pairs_table(fits: list[Fit]) -> Table:
    table = _table("pairs: target", "drafter", ">relative size")
    for fit in fits:
        table.add_row(fit.model, fit.draft_model, f"{100 * fit.ratio:.0f} %")
    return table


def _card(model: Model) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    stored = model.weight_bytes
    on_cpu = bytes_on_cpu(model.architecture, model.parameters, stored)
    kv = model.kv_bytes_per_token / 1e3
    on_cpu_times = bytes_of_kv(model.architecture, on_cpu=True) / bytes_of_kv("", on_cpu=False)
    rows = {
        "model": model.name,
        "folder": model.folder,
        "architecture": model.architecture,
        "parameters": _billions(model.parameters),
        "quantisation": model.quantization or "none",
        "context": f"{model.context_length} tokens" if model.context_length else "not said",
        "vocabulary": f"{model.vocabulary_size} tokens, fingerprint {model.vocabulary}",
        "head": "frequent tokens only: a drafter" if model.only_drafts else "whole",
        "on disk": format_bytes(model.disk_bytes),
        "weights in memory": f"{format_bytes(stored)} on a GPU, {format_bytes(on_cpu)} on a CPU",
        "KV in memory": f"{kv:.1f} kB a token on a GPU, {on_cpu_times * kv:.1f} kB on a CPU",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _format_recommendation(r: Recommendation) -> Text:
    fits = "" if r.fits else ", too much for this machine"
    speed = f", about {r.plain_tok_s:.1f} tok/s without drafts" if r.plain_tok_s else ""
    licence = f"licence: {r.licence}, not checked; see the model's card"
    what = f" (a head: {r.head}; {licence})" if r.head else ""
    facts = [
        f"drafter  {r.draft_model}{what}",
        f"{', '.join(r.purposes)}; {format_bytes(r.memory_bytes)}{speed}{fits}",
        f"expected up to {r.expected_tokens_per_round:.1f} tokens a round "
        f"({r.assumed_acceptance:.2f} of the drafts accepted: assumed)",
    ]
    facts += [r.schedule] if r.schedule else []
    facts += [f"measured: {r.measured}"] if r.measured else []
    facts += [r.note] if r.note else []
    dim = "" if r.fits else "dim"
    mark = " (measured)" if r.measured else ""
    lines = mark + "".join(f"\n  {fact}" for fact in facts)
    return Text.assemble((r.model, f"bold {dim}"), (lines, dim))


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        right = column.startswith(">")
        name = column.removeprefix(">")
        # Names are for copying: never truncate them.
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _billions(parameters: int) -> str:
    if not parameters:
        return "-"
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"
