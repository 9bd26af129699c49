"""`ssd generate`: answers on a stack that runs, or on a private one."""

from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from launch.prompts import Prompt, read_prompts
from launch.settings.flags import Command, Option
from launch.settings.options import sampling_options, settings_of, stack_options
from launch.settings.sampling import SamplingChoice, take_sampling_choice
from launch.stack.run_dir import DEFAULT_NAME
from launch.stack.session import session
from launch.terminal import console, generate
from protocol.errors import UsageError
from protocol.messages import MAX_NODES, Generate, Mode

_prompt = partial(click.option, cls=Option, group="Prompt")
_answer = partial(click.option, cls=Option, group="Answer")
_speculation = partial(click.option, cls=Option, group="Speculation")


@click.command("generate", cls=Command)
@click.argument("text", required=False, metavar="[PROMPT]")
@_prompt("-p", "--prompt", help="The prompt; - reads standard input.")
@_prompt("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="JSONL: id, prompt.")
@_prompt("--system-prompt", default="", help="System prompt.")
@_prompt(
    "-m",
    "--max-tokens",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Longest answer in tokens; 0: no limit but the context.",
)
@_prompt("--stop", multiple=True, help="End before this text (repeatable).")
@sampling_options()
@_answer("--stats", is_flag=True, help="Print statistics after each answer.")
@_answer("--explain", is_flag=True, help="Explain what was chosen and why.")
@_answer("--show-draft", is_flag=True, help="Colour tokens by where they came from.")
@_answer("--json", "as_json", is_flag=True, help="One JSON object per prompt.")
@_answer(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Write a trace for Perfetto or chrome://tracing.",
)
@_answer(
    "--name", default=DEFAULT_NAME, show_default=True, help="Attach to this stack if it is running."
)
@_answer("-v", "--verbose", is_flag=True, help="Show processes as they start.")
@_speculation("--mode", type=click.Choice(get_args(Mode)), default="ssd", show_default=True)
@_speculation(
    "--num-draft-tokens",
    type=click.IntRange(0, 64),
    default=0,
    show_default=True,
    help="Draft tokens per round; 0 leaves it to the planner.",
)
@_speculation(
    "--branches",
    type=click.IntRange(0, 256),
    default=0,
    show_default=True,
    help="Branches prepared per round; 0 leaves it to the planner.",
)
@_speculation(
    "--tree-nodes",
    type=click.IntRange(0, MAX_NODES),
    help="Draft tokens of verified trees; 0 or 1: chains. Left out: what pays.",
)
@_speculation(
    "--verify-ahead/--no-verify-ahead",
    default=None,
    help="Let the verifier begin prepared rounds by itself. Left out: if that pays.",
)
@stack_options()
def command(**options: Any) -> None:
    """Answer a prompt, on a running stack or a private one."""
    prompts = _prompts(options.pop("text"), options.pop("prompt"), options.pop("prompts"))
    verbose = options.pop("verbose")
    report = console.process_line if verbose else console.report_trouble
    name = options.pop("name")
    sampling_choice, answer_options = _answer_options(options, details=verbose)
    settings = settings_of(**options)
    with session(settings, name, report) as client:
        status = client.status()
        for sentence in status.degraded:
            console.note(sentence)
        sampling = sampling_choice.resolve(status.model)
        generate.answer_all(client, prompts, answer_options.with_sampling(sampling))


def _prompts(text: str | None, prompt: str | None, file: Path | None) -> list[Prompt]:
    given = [source for source in (text, prompt, file) if source is not None]
    if len(given) != 1:
        raise UsageError("give exactly one of PROMPT, --prompt and --prompts")
    if file is not None:
        return read_prompts(file)
    return [Prompt(generate.read_prompt(str(given[0])))]


def _answer_options(
    options: dict[str, Any], *, details: bool
) -> tuple[SamplingChoice, generate.Options]:
    """Take the options of the answer out of `options`; what is left configures the stack."""
    choice = take_sampling_choice(options)
    choice.check()
    template = Generate(
        request=0,
        max_tokens=options.pop("max_tokens") or generate.UNLIMITED,
        stop=list(options.pop("stop")),
        mode=options.pop("mode"),
        num_draft_tokens=options.pop("num_draft_tokens"),
        max_draft_tokens=choice.max_draft_tokens,
        branches=options.pop("branches"),
        tree_nodes=options.pop("tree_nodes"),
        verify_ahead=options.pop("verify_ahead"),
        trace=options["trace"] is not None,
    )
    return choice, generate.Options(
        template=template,
        system_prompt=options.pop("system_prompt"),
        as_json=options.pop("as_json"),
        statistics=options.pop("stats"),
        details=details,
        show_draft=options.pop("show_draft"),
        explain=options.pop("explain"),
        trace=options.pop("trace"),
    )
