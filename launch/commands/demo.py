"""`ssd demo`: the gain of speculation, shown in a minute."""

import contextlib
from typing import Any

import click

from launch.models.default_pair import add_default
from launch.prompts import Prompt, own_prompts, read_prompts
from launch.settings.flags import Command
from launch.settings.options import settings_of, stack_options
from launch.stack.prepared import await_prepared
from launch.stack.session import private_stack
from launch.terminal import console
from launch.terminal.demo import Demo
from protocol.client.client import Client


@click.command("demo", cls=Command)
@click.option(
    "-m", "--max-tokens", type=click.IntRange(min=8), default=96, show_default=True,
    help="Longest answer in tokens.",
)  # fmt: skip
@click.option("--stats", is_flag=True, help="Print statistics after each answer.")
@click.option("-v", "--verbose", is_flag=True, help="Show the processes as they start.")
@stack_options()
def command(*, max_tokens: int, stats: bool, verbose: bool, **stack: Any) -> None:
    """Compare plain and speculative decoding on four prompts.

    They ask for prose, code, a sum, and for a list to be written again. The default pair is set up
    first if needed.
    """
    if stack["prompt_cache_size"] is None:
        stack["prompt_cache_size"] = 0  # each prompt is decoded twice
    settings = settings_of(**stack)
    if not settings.model:
        with console.bytes_bar() as progress:
            add_default(progress)
    report = console.process_line if verbose else console.report_trouble
    with (
        console.stderr().status("loading the models") as status,
        private_stack(settings, report) as supervisor,
        contextlib.closing(Client(supervisor.run_dir.clients_address)) as client,
    ):
        await_prepared(client)
        status.stop()
        Demo(client, max_tokens, statistics=stats).run(_pick_prompts())


def _pick_prompts() -> list[Prompt]:
    """Return the first of our prompts in each category."""
    first: dict[str, Prompt] = {}
    for prompt in read_prompts(own_prompts()):
        first.setdefault(prompt.category, prompt)
    return list(first.values())
