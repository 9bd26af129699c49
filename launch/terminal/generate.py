"""`ssd generate`: prompts in, answers out."""

import contextlib
import json
import secrets
import sys
from collections.abc import Generator, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from launch.prompts import Prompt
from launch.terminal import console
from protocol.client.client import Client
from protocol.errors import UsageError
from protocol.messages import ChatMessage, Finished, Generate, Sampling, Text, TraceEvent


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an answer and of its display."""

    template: Generate
    """The request without its messages and number."""
    system_prompt: str = ""
    is_raw: bool = False
    """True if prompts are texts to continue, rather than messages."""
    as_json: bool = False
    statistics: bool = False
    details: bool = False
    """Include the statistics of the rounds."""
    show_draft: bool = False
    explain: bool = False
    trace: Path | None = None
    """File for the timeline."""

    def with_sampling(self, sampling: Sampling) -> "Options":
        """Return the same options with other sampling."""
        template = msgspec.structs.replace(self.template, sampling=sampling)
        return msgspec.structs.replace(self, template=template)


UNLIMITED = 2**31 - 1
"""More tokens than any context holds: the value of `--max-tokens 0`."""


def new_seed() -> int:
    """Return a random seed for a user who gives none; it is reported, so runs can be repeated."""
    return secrets.randbits(31)


def read_prompt(prompt: str) -> str:
    """Return the prompt, or standard input for `-`; raise UsageError if it cannot be used."""
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 text ({error.reason})") from error
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    return prompt


def answer_all(client: Client, prompts: list[Prompt], options: Options) -> None:
    """Answer each prompt in turn, on standard output."""
    slices: list[TraceEvent] = []
    for index, prompt in enumerate(prompts):
        if options.as_json:
            slices += _print_json(client, prompt, options)
        else:
            if len(prompts) > 1:
                console.stderr().print(f"{'' if index == 0 else chr(10)}[{prompt.id or index + 1}]")
            slices += _print_text(client, prompt, options)
    if options.trace is not None:
        from launch.terminal.trace import write_trace  # noqa: PLC0415

        write_trace(options.trace, slices)


def stream_with_progress(client: Client, request: Generate) -> Generator[Text | Finished]:
    """Stream the answer; until it starts, show the progress of the prompt on the terminal."""
    line = console.PromptProgress()
    client.on_progress = line.show
    request = msgspec.structs.replace(request, progress=line.is_wanted)
    try:
        with contextlib.closing(client.generate(request)) as events:
            for event in events:
                line.clear()
                yield event
    finally:
        line.clear()


def notes(finished: Finished, request: Generate) -> Iterator[str]:
    """Yield notes on the answer, in sentences: that it was cut, or had no drafter."""
    if finished.reason == "length":
        yield f"stopped after {request.max_tokens} tokens (--max-tokens)"
    elif finished.reason == "context":
        yield "stopped: the model's context is full"
    s = finished.statistics
    missing = s.fallbacks.get("no_drafter", 0)
    if missing and request.mode != "ar":
        yield (
            f"there was no drafter in {missing} of {s.rounds} rounds "
            "(the lines above say why, or `ssd logs` of a running stack)"
        )


def _request(client: Client, prompt: Prompt, options: Options) -> Generate:
    number = client.number()
    if options.is_raw:
        text = prompt.prompt + options.template.answer_start
        return msgspec.structs.replace(options.template, request=number, text=text, answer_start="")
    messages = [ChatMessage("user", prompt.prompt)]
    if options.system_prompt:
        messages.insert(0, ChatMessage("system", options.system_prompt))
    return msgspec.structs.replace(options.template, request=number, messages=messages)


def _print_text(client: Client, prompt: Prompt, options: Options) -> list[TraceEvent]:
    out = console.stdout() if options.show_draft else None
    finished, tokens = None, 0
    request = _request(client, prompt, options)
    for message in stream_with_progress(client, request):
        if isinstance(message, Finished):
            finished = message
            continue
        tokens += len(message.tokens)
        if out is None:
            console.write(message.text)
        else:
            for piece, origin in zip_longest(message.pieces, message.origins, fillvalue="target"):
                console.write_coloured(out, piece, origin)
    console.write("\n")
    if options.show_draft:
        console.stderr().print(console.LEGEND)
    if finished is None:
        return []
    for sentence in notes(finished, request):
        console.note(sentence)
    if options.explain:
        from launch.terminal.explain import explanation  # noqa: PLC0415

        console.stderr().print(explanation(request.mode, finished.statistics), markup=False)
    if options.statistics:
        from launch.terminal.statistics import peak_memory, statistics_table  # noqa: PLC0415

        memory = peak_memory(client)
        table = statistics_table(finished, tokens, memory=memory, details=options.details)
        console.stderr().print(table)
    return finished.timeline


def _print_json(client: Client, prompt: Prompt, options: Options) -> list[TraceEvent]:
    text, tokens = "", list[int]()
    timeline: list[TraceEvent] = []
    request = _request(client, prompt, options)
    for message in stream_with_progress(client, request):
        if isinstance(message, Text):
            text += message.text
            tokens += message.tokens
        else:
            timeline = message.timeline
            for sentence in notes(message, request):
                console.note(sentence)
            record = _record(client, options.template, message)
            identity: dict[str, Any] = {"id": prompt.id} if prompt.id != "" else {}
            console.write(json.dumps({**identity, "text": text, "tokens": tokens, **record}) + "\n")
    return timeline


def _record(client: Client, request: Generate, finished: Finished) -> dict[str, Any]:
    status = client.status()
    return {
        "prompt_tokens": finished.prompt_tokens,
        "finish_reason": finished.reason,
        "model": status.model,
        "draft_model": status.drafter.model if status.drafter is not None else None,
        "draft_backend": status.draft_backend,
        "mode": request.mode,
        "seed": request.sampling.seed,
        "stats": msgspec.to_builtins(finished.statistics),
    }
