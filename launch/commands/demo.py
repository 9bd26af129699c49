"""`ssd demo`: the gain of speculation, shown on answers of a real model."""

import contextlib
from typing import Any

import click

from launch.models.own_drafters import DEFAULT
from launch.models.registry import add_known
from launch.prompts import demo_prompts, read_prompts
from launch.settings.flags import Command
from launch.settings.options import settings_of, stack_options
from launch.stack.prepared import await_prepared
from launch.stack.session import private_stack
from launch.terminal import console
from launch.terminal.demo import Demo
from protocol.client.client import Client
from protocol.errors import ModelError, RuntimeFailure, UsageError

_MODEL = "coder"


@click.command("demo", cls=Command)
@click.option(
    "-m", "--max-tokens", type=click.IntRange(min=8), default=160, show_default=True,
    help="Longest answer in tokens.",
)  # fmt: skip
@click.option("--small", is_flag=True, help="Use the default pair: 93 MB, not 1.1 GB.")
@click.option("--stats", is_flag=True, help="Print statistics after each answer.")
@click.option("-v", "--verbose", is_flag=True, help="Show the processes as they start.")
@stack_options()
def command(*, max_tokens: int, small: bool, stats: bool, verbose: bool, **stack: Any) -> None:
    """Compare plain and speculative decoding on four prompts.

    They ask for code, an explanation, a change in a file, and a translation. Qwen2.5-Coder 1.5B is
    set up first if needed; where it cannot be, the default pair answers.
    """
    if stack["prompt_cache_size"] is None:
        stack["prompt_cache_size"] = 0  # each prompt is decoded twice
    if not settings_of(**stack).model:
        stack["model"] = set_up(small=small)
    elif small:
        raise UsageError("--small chooses the default pair; leave out --model")
    report = console.process_line if verbose else console.report_trouble
    with (
        console.stderr().status("loading the model") as status,
        private_stack(settings_of(**stack), report) as supervisor,
        contextlib.closing(Client(supervisor.run_dir.clients_address)) as client,
    ):
        await_prepared(client)
        status.stop()
        Demo(client, max_tokens, statistics=stats).run(read_prompts(demo_prompts()))
    name = stack["model"] or ""
    flag = f" --model {name}" if name else ""
    console.note(f"now yours: `ssd chat{flag}`, or `ssd serve{flag}` for your own programs")


def set_up(*, small: bool) -> str | None:
    """Set up the demo's model, or else the default pair; return its name for --model."""
    reason = "as asked"
    with console.bytes_bar() as progress:
        if not small:
            try:
                add_known(_MODEL, progress)
            except (ModelError, RuntimeFailure) as error:
                reason = f"since {error}"
            else:
                return _MODEL
        add_known(DEFAULT, progress)
    console.note(f"answering with the small model, SmolLM2-135M, {reason}")
    return None
