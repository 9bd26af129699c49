"""`ssd generate`: answers on a stack that runs, or on a private one."""

from pathlib import Path
from typing import Any, get_args

import click

from launch.prompts import Prompt, read_prompts
from launch.settings.options import (
    sampling_options,
    settings_of,
    stack_options,
    take_saguaro_choice,
    take_sampling,
)
from launch.stack.run_dir import DEFAULT_NAME
from launch.stack.session import session
from launch.terminal import console, generate
from protocol.errors import UsageError
from protocol.messages import FanOutPolicy, Generate


@click.command("generate")
@click.argument("text", required=False)
@stack_options()
@sampling_options()
@click.option("-p", "--prompt", help="The prompt; - reads standard input.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSONL file: id, prompt.")
@click.option("--system-prompt", default="", help="Put before the prompt.")
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--mode", type=click.Choice(["ar", "sd", "ssd"]), default="ssd", show_default=True)
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(0, 64),
    default=0,
    help="Draft tokens per round; 0 leaves it to the orchestrator.",
)
@click.option(
    "--fan-out",
    type=click.IntRange(0, 256),
    default=0,
    help="Branches prepared per round; 0 leaves it to the orchestrator.",
)
@click.option("--name", default=DEFAULT_NAME, help="Attach to this stack if it is running.")
@click.option(
    "--fan-out-policy",
    type=click.Choice(get_args(FanOutPolicy)),
    default="online",
    show_default=True,
    help="Share branches out by what was learned, by Theorem 12, or evenly.",
)
@click.option("--explain", is_flag=True, help="Say what was chosen and why.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write who did what when, as JSON for Perfetto or chrome://tracing.",
)
@click.option("--stats", is_flag=True, help="Print statistics after each answer.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per prompt.")
@click.option("--show-draft", is_flag=True, help="Colour tokens by where they came from.")
@click.option("-v", "--verbose", is_flag=True, help="Show the processes as they start.")
def command(**options: Any) -> None:  # fmt: skip
    """Answer a prompt: on the running stack, or on a private one."""
    prompts = _prompts(options.pop("text"), options.pop("prompt"), options.pop("prompts"))
    report = console.process_line if options.pop("verbose") else console.long_waits
    name = options.pop("name")
    answer_options = _answer_options(options)
    settings = settings_of(**options)
    with session(settings, name, report) as client:
        generate.answer_all(client, prompts, answer_options)


def _prompts(text: str | None, prompt: str | None, file: Path | None) -> list[Prompt]:
    given = [source for source in (text, prompt, file) if source is not None]
    if len(given) != 1:
        raise UsageError("give exactly one of a prompt, --prompt and --prompts")
    if file is not None:
        return read_prompts(file)
    return [Prompt(generate.read_prompt(str(given[0])))]


def _answer_options(options: dict[str, Any]) -> generate.Options:
    """Take the options of the answer out of `options`; what is left configures the stack."""
    choose_saguaro = take_saguaro_choice(options)
    sampling = take_sampling(options)
    template = Generate(
        request=0,
        sampling=sampling,
        max_tokens=options.pop("max_tokens"),
        stop=list(options.pop("stop")),
        mode=options.pop("mode"),
        num_draft_tokens=options.pop("num_draft_tokens"),
        branches=options.pop("fan_out"),
        fan_out_policy=options.pop("fan_out_policy"),
        trace=options["trace"] is not None,
        choose_saguaro=choose_saguaro,
    )
    return generate.Options(
        template=template,
        system_prompt=options.pop("system_prompt"),
        as_json=options.pop("as_json"),
        statistics=options.pop("stats"),
        show_draft=options.pop("show_draft"),
        explain=options.pop("explain"),
        trace=options.pop("trace"),
    )
