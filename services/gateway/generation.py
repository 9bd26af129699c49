"""One answer's events from the orchestrator, with a limit on the model's thinking."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from msgspec.structs import replace

from protocol.client.async_client import AsyncClient
from protocol.errors import Busy
from protocol.messages import Finished, Generate, Text, Tokens
from services.gateway.dialects.base import merge
from services.gateway.reasoning import ThoughtLimit
from services.gateway.task import Choice

_AT_ONCE = 16
"""Answers to one request that the orchestrator has at the same time."""
_BUSY_S = 0.5
"""Pause before one of the others is asked for again, if the queue was full."""


def generate_all(
    client: AsyncClient, choices: Sequence[Choice]
) -> AsyncGenerator[tuple[int, Text | Finished]]:
    """Yield the events of all choices, each with its choice's number; as `generate`."""
    first, others = choices[:_AT_ONCE], choices[_AT_ONCE:]
    sources = [generate(client, one) for one in first]
    return merge([*sources, *(_generate_late(client, one) for one in others)], _AT_ONCE)


async def _generate_late(client: AsyncClient, choice: Choice) -> AsyncGenerator[Text | Finished]:
    """As `generate`, for a request whose first answers were accepted: wait for a full queue."""
    while True:
        try:
            async with contextlib.aclosing(generate(client, choice)) as events:
                async for event in events:
                    yield event
        except Busy:
            await asyncio.sleep(_BUSY_S)
        else:
            return


async def generate(client: AsyncClient, choice: Choice) -> AsyncGenerator[Text | Finished]:
    """Yield Text messages, then one Finished. Closing the generator cancels.

    A thought that has used up its budget is ended by its mark, and the model continues from there.
    Errors as for `AsyncClient.generate`.
    """
    limit = choice.thought_limit
    tokens: Tokens = []
    async with contextlib.aclosing(client.generate(choice.request, choice.on_progress)) as events:
        async for event in events:
            yield event
            if limit is None or isinstance(event, Finished):
                continue
            tokens += event.tokens
            if limit.is_reached(event):
                break
        else:
            return
    rest = _continue(choice.request, tokens, limit)
    yield Text(request=rest.request, tokens=[], origins=[], pieces=[limit.end])
    async with contextlib.aclosing(client.generate(rest)) as events:
        async for event in events:
            if isinstance(event, Finished):
                yield replace(event, prompt_tokens=max(0, event.prompt_tokens - len(tokens)))
            else:
                yield event


async def share_prompts(client: AsyncClient, choices: Sequence[Choice], each: int) -> None:
    """Have each prompt tokenised once; its choices then ask with its tokens.

    A choice whose thought may be cut short keeps the text, with which it is continued.

    Args:
        client: of the orchestrator; errors as for `AsyncClient.generate`.
        choices: of all prompts.
        each: choices of a prompt.
    """
    for first in range(0, len(choices), each):
        asked = choices[first].request
        if asked.tokens:
            continue
        question = replace(asked, count_only=True, progress=False)
        async with contextlib.aclosing(client.generate(question)) as events:
            [prompt] = [event.prompt async for event in events if isinstance(event, Finished)]
        for choice in choices[first : first + each]:
            if choice.thought_limit is None:
                choice.request = _ask_with(choice.request, prompt)


def _ask_with(request: Generate, prompt: Tokens) -> Generate:
    """The request with the tokens of its prompt."""
    return replace(
        request,
        tokens=prompt,
        text="",
        messages=[],
        tools=[],
        template_options={},
        answer_start="",
        # What a model marks calls with is text where there are tools.
        special_text=request.special_text or bool(request.tools),
    )


def _continue(request: Generate, tokens: Tokens, limit: ThoughtLimit) -> Generate:
    """Return the request for what follows the end of the thought."""
    sampling = request.sampling
    if sampling.logits_options is not None and limit.after:
        options = replace(sampling.logits_options, grammar=limit.after)
        sampling = replace(sampling, logits_options=options)
    return replace(
        request,
        sampling=sampling,
        answer_tokens=[*request.answer_tokens, *tokens],
        answer_start=limit.end,
        max_tokens=max(1, request.max_tokens - len(tokens)),
    )
