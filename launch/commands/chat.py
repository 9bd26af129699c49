"""`ssd chat`: a chat with the model."""

from typing import Any

import click
from msgspec.structs import replace

from launch.settings.flags import Command
from launch.settings.options import (
    conversation_options,
    sampling_options,
    settings_of,
    stack_options,
)
from launch.settings.sampling import take_sampling_choice
from launch.stack.session import session
from launch.terminal import console
from launch.terminal.chat import Chat
from launch.terminal.generate import UNLIMITED
from protocol.messages import Generate


@click.command("chat", cls=Command)
@stack_options()
@sampling_options()
@conversation_options(max_tokens=1024)
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
