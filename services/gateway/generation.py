"""One answer's events from the orchestrator, with a bound on how long the model may think."""

import contextlib
from collections.abc import AsyncGenerator

from msgspec.structs import replace

from protocol.client.async_client import AsyncClient
from protocol.messages import Finished, Generate, Text, Tokens
from services.gateway.reasoning import ThoughtLimit
from services.gateway.task import Choice


async def generate(client: AsyncClient, choice: Choice) -> AsyncGenerator[Text | Finished]:
    """The answer: Text messages, then one Finished. Closing the generator cancels.

    A thought that has used up its budget is ended by its mark, and the model is asked to go on
    from there. Errors as for `AsyncClient.generate`.
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


def _continue(request: Generate, tokens: Tokens, limit: ThoughtLimit) -> Generate:
    """The request for what follows the end of the thought."""
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
