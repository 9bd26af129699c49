"""`ssd generate`: answers from a running stack, or from a private one."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import msgspec

from launch.prompts import Prompt, read_prompts
from launch.settings.flags import Command, Option
from launch.settings.options import (
    conversation_options,
    sampling_options,
    settings_of,
    stack_options,
)
from launch.settings.sampling import SamplingChoice, take_sampling_choice
from launch.stack.session import session
from launch.terminal import console, generate
from protocol.errors import UsageError
from protocol.messages import MAX_NODES, Generate

_prompt = partial(click.option, cls=Option, group="Prompt")
_answer = partial(click.option, cls=Option, group="Answer")
_speculation = partial(click.option, cls=Option, group="Speculation")


class _Generate(Command):
    """Suggests alternatives for flags of `mlx_lm.generate` that do not exist here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raise UsageError for such a flag."""
        args = _drop_verbose_value(args)
        for flag in (argument.partition("=")[0] for argument in args):
            if flag in _NOT_HERE:
                raise UsageError(f"{flag} of mlx_lm.generate is not here: {_NOT_HERE[flag]}")
        return super().parse_args(ctx, args)


def _drop_verbose_value(args: list[str]) -> list[str]:
    """Drop the value of `--verbose True` and `--verbose False`, which only mlx_lm.generate has."""
    for at, pair in enumerate(pairwise(args)):
        if pair[0] == "--verbose" and pair[1] in ("True", "T", "False", "F"):
            kept = ["--verbose"] if pair[1].startswith("T") else []
            return [*args[:at], *kept, *args[at + 2 :]]
    return args


_FULL_KV = "the KV cache keeps full precision, or drafts would change the answer"
_NOT_HERE = {
    "--extra-eos-token": "end the answer with --stop",
    "--trust-remote-code": "models bring no code",
    "--image": "models read text only",
    "--xtc-probability": "use --min-p or --top-p",
    "--xtc-threshold": "use --min-p or --top-p",
    "--min-tokens-to-keep": "one token is always kept",
    "--use-default-chat-template": "give the model folder a chat_template.jinja",
    "--max-kv-size": "limit the memory with --set kv_bytes=N",
    "--quantize-activations": "choose a model that is quantized as you want it",
    "-qa": "choose a model that is quantized as you want it",
    "--kv-bits": _FULL_KV,
    "--kv-group-size": _FULL_KV,
    "--quantized-kv-start": _FULL_KV,
}


@click.command("generate", cls=_Generate)
@click.argument("text", required=False, metavar="[PROMPT]")
@_prompt("-p", "--prompt", help="The prompt; - reads standard input.")
@_prompt("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="JSONL: id, prompt.")
@_prompt("--prefill-response", default="", metavar="TEXT", help="Beginning of the answer.")
@_prompt("--ignore-chat-template", is_flag=True, help="Continue the prompt as it is.")
@_prompt("--chat-template-config", metavar="JSON", help="Variables of the chat template.")
@_prompt("--stop", multiple=True, help="End before this text (repeatable).")
@conversation_options(max_tokens=256)
@sampling_options()
@_answer("--stats", is_flag=True, help="Print statistics after each answer.")
@_answer("--explain", is_flag=True, help="Explain what was chosen and why.")
@_answer("--json", "as_json", is_flag=True, help="One JSON object per prompt.")
@_answer(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Write a trace for Perfetto or chrome://tracing.",
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
    default=0,
    show_default=True,
    help="Draft tokens of verified trees; 0 or 1: chains.",
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
    sources = [source for source in (text, prompt, file) if source is not None]
    if len(sources) != 1:
        raise UsageError("give exactly one of PROMPT, --prompt and --prompts")
    if file is not None:
        return read_prompts(file)
    return [Prompt(generate.read_prompt(str(sources[0])))]


def _answer_options(
    options: dict[str, Any], *, details: bool
) -> tuple[SamplingChoice, generate.Options]:
    """Take the options of the answer out of `options`; the rest configures the stack."""
    choice = take_sampling_choice(options)
    choice.check()
    variables = options.pop("chat_template_config")
    template = Generate(
        request=0,
        max_tokens=options.pop("max_tokens") or generate.UNLIMITED,
        stop=list(options.pop("stop")),
        mode=options.pop("mode"),
        num_draft_tokens=options.pop("num_draft_tokens"),
        max_draft_tokens=choice.max_draft_tokens,
        branches=options.pop("branches"),
        tree_nodes=options.pop("tree_nodes"),
        trace=options["trace"] is not None,
        answer_start=options.pop("prefill_response"),
        template_options=_read_variables(variables) if variables else {},
    )
    return choice, generate.Options(
        template=template,
        system_prompt=options.pop("system_prompt"),
        is_raw=options.pop("ignore_chat_template"),
        as_json=options.pop("as_json"),
        statistics=options.pop("stats"),
        details=details,
        show_draft=options.pop("show_draft"),
        explain=options.pop("explain"),
        trace=options.pop("trace"),
    )


def _read_variables(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"--chat-template-config is not a JSON object: {error}") from error
