"""`ssd chat`: a chat with the model."""

from typing import Any

import click
from msgspec.structs import replace

from launch.settings.flags import Command
from launch.settings.options import sampling_options, settings_of, stack_options
from launch.settings.sampling import take_sampling_choice
from launch.stack.run_dir import DEFAULT_NAME
from launch.stack.session import session
from launch.terminal import console
from launch.terminal.chat import Chat
from launch.terminal.generate import UNLIMITED
from protocol.messages import Generate


@click.command("chat", cls=Command)
@stack_options()
@sampling_options()
@click.option("--system-prompt", default="", help="System prompt.")
@click.option("-m", "--max-tokens", type=click.IntRange(min=0), default=1024, show_default=True,
              help="Longest answer in tokens; 0: no limit but the context.")  # fmt: skip
@click.option("--mode", type=click.Choice(["ar", "sd", "ssd"]), default="ssd", show_default=True)
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(0, 64),
    default=0,
    help="Draft tokens per round; 0: the planner decides.",
)
@click.option("--show-draft", is_flag=True, help="Colour tokens by where they came from.")
@click.option("--name", default=DEFAULT_NAME, help="Attach to this stack if it is running.")
@click.option("-v", "--verbose", is_flag=True, help="Show processes as they start.")
def command(**options: Any) -> None:
    """Chat with the model: /help for help, Ctrl-D quits."""
    choice = take_sampling_choice(options)
    choice.check()
    template = Generate(
        request=0,
        max_draft_tokens=choice.max_draft_tokens,
        max_tokens=options.pop("max_tokens") or UNLIMITED,
        mode=options.pop("mode"),
        num_draft_tokens=options.pop("num_draft_tokens"),
    )
    system_prompt, show_draft = options.pop("system_prompt"), options.pop("show_draft")
    report = console.process_line if options.pop("verbose") else console.report_trouble
    name = options.pop("name")
    with session(settings_of(**options), name, report) as client:
        template = replace(template, sampling=choice.resolve(client.status().model))
        Chat(client, template, system_prompt=system_prompt, show_draft=show_draft).run()
