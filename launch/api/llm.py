"""`LLM`: a private stack behind a Python object."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from launch.api.sampling_params import Prompt, SamplingParams
from launch.settings.settings import stack_settings
from launch.stack.session import private_stack
from protocol.client.async_client import AsyncClient
from protocol.client.client import Client
from protocol.errors import ProtocolError, UsageError
from protocol.messages import (
    Finished,
    FinishReason,
    Generate,
    Logprobs,
    ProcessStatus,
    Statistics,
    Text,
    Tokens,
)
from protocol.process.closeable import Closeable

_log = logging.getLogger("ssd_decode")

_AT_ONCE = 16
"""Requests that one call keeps at the stack, which decodes some of them and queues the others."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One complete answer; `answer["text"]` is `answer.text`, as in other engines."""

    text: str
    tokens: Tokens
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens found in the KV of earlier requests."""
    seed: int
    statistics: Statistics
    logprobs: list[Logprobs] = []
    """One per token, if requested."""

    def __getitem__(self, name: str) -> Any:
        """Return a field by its name; `token_ids` are the tokens."""
        name = "tokens" if name == "token_ids" else name
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def summary(self) -> str:
        """Describe speed and acceptance in a line."""
        s = self.statistics
        text = f"{len(self.tokens)} tokens, {s.tok_s:.1f} tok/s"
        if s.drafted:
            text += f", {s.accepted} of {s.drafted} draft tokens accepted"
        return f"{text}, {s.rounds} rounds, ended by {self.finish_reason}"


class LLM(Closeable):
    """A loaded pair. Use it as a context manager, or call `close`: it owns processes.

    Args:
        model: target folder or hub name; the default pair's target if left out.
        draft_model: drafter folder or hub name.
        draft: the same, as other engines spell it.
        speculate_k: draft tokens per round of requests that do not set it; 0 leaves it to the
            planner.
        settings: any other setting of a stack, as in `ssd.toml`.

    Raises:
        SsdError: the stack cannot be started; the message says why.

    >>> with LLM() as llm:
    ...     [answer] = llm.generate("Why is the sky blue?", SamplingParams(max_tokens=8))
    >>> len(answer.tokens), answer.finish_reason
    (8, 'length')

    Without a `with` block, `close` it.

    >>> import asyncio
    >>> async def ask():
    ...     async with LLM() as llm:
    ...         return await llm.agenerate(["one", "two"], SamplingParams(max_tokens=4))
    >>> len(asyncio.run(ask()))
    2
    """

    def __init__(
        self,
        model: str = "",
        draft_model: str = "",
        *,
        draft: str = "",
        speculate_k: int = 0,
        **settings: Any,
    ) -> None:
        if draft and draft_model:
            raise UsageError("draft and draft_model are the same setting: give one of them")
        SamplingParams(num_draft_tokens=speculate_k)  # raises if it is out of range
        self._num_draft_tokens = speculate_k
        self._closed = False
        values = {"model": model, "draft_model": draft_model or draft, **settings}
        flags = {key: value for key, value in values.items() if value != ""}
        self._exit = contextlib.ExitStack()
        supervisor = self._exit.enter_context(private_stack(stack_settings(flags), _report_trouble))
        address = supervisor.run_dir.clients_address
        self._address = address
        self._numbers = itertools.count(1)
        self._async_client = self._exit.enter_context(AsyncClient(address))

    def get_default_sampling_params(self, **others: Any) -> SamplingParams:
        """Return the model's recommended parameters (`generation_config.json`), else greedy
        ones.
        """
        with contextlib.closing(Client(self._address)) as client:
            return SamplingParams.of_model(client.status().model, **others)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Answer]:
        """Answer one prompt or several, which share the stack; the answers keep their order.

        Args:
            prompts: a text, a conversation (messages with role and content), or several of
                them.
            params: how to answer; greedily if left out.

        Raises:
            UsageError: a prompt or parameter cannot be used.
            RuntimeFailure: a request failed.
        """
        requests = self._requests(prompts, params)
        partial = {request.request: _PartialAnswer(request) for request in requests}
        with contextlib.closing(Client(self._address)) as client:
            for number, event in client.generate_many(requests, _AT_ONCE):
                partial[number].add(event)
        return [partial[request.request].answer() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Text | Finished]:
        """Stream one answer: Text events, then Finished with the statistics.

        Closing the generator early cancels the request. Errors as for `generate`.
        """
        [request] = self._requests([prompt], params)
        return self._stream(request)

    def _stream(self, request: Generate) -> Generator[Text | Finished]:
        # A separate connection: several streams may be read alternately, or by several threads.
        with contextlib.closing(Client(self._address)) as client:
            yield from client.generate(request)

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Answer]:
        """Run `generate` for programs that use asyncio."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def answer(request: Generate) -> Answer:
            partial = _PartialAnswer(request)
            async with places:
                async for event in self._astream(request):
                    partial.add(event)
            return partial.answer()

        async with asyncio.TaskGroup() as group:
            requests = self._requests(prompts, params)
            tasks = [group.create_task(answer(request)) for request in requests]
        return [task.result() for task in tasks]

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Text | Finished]:
        """Run `stream` for programs that use asyncio."""
        [request] = self._requests([prompt], params)
        return self._astream(request)

    async def _astream(self, request: Generate) -> AsyncGenerator[Text | Finished]:
        await self._async_client.status()  # raises if the orchestrator is gone
        events = self._async_client.generate(request)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None
    ) -> list[Generate]:
        if self._closed:
            raise UsageError("this LLM is closed; make another one")
        if not isinstance(params, SamplingParams | None):
            raise UsageError(f"params must be SamplingParams(...), not {type(params).__name__}")
        chosen = params or SamplingParams()
        if not chosen.num_draft_tokens and self._num_draft_tokens:
            chosen = msgspec.structs.replace(chosen, num_draft_tokens=self._num_draft_tokens)
        return [chosen.request(next(self._numbers), prompt) for prompt in _list_prompts(prompts)]

    def close(self) -> None:
        """Stop all processes; safe to call twice."""
        self._closed = True
        self._exit.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)


class _PartialAnswer:
    """An answer that is being received."""

    def __init__(self, request: Generate) -> None:
        self._request = request
        self._texts: list[Text] = []
        self._finished: Finished | None = None

    def add(self, event: Text | Finished) -> None:
        if isinstance(event, Text):
            self._texts.append(event)
        else:
            self._finished = event

    def answer(self) -> Answer:
        if self._finished is None:
            raise ProtocolError("the answer has not ended")
        return Answer(
            text="".join(text.text for text in self._texts),
            tokens=[token for text in self._texts for token in text.tokens],
            finish_reason=self._finished.reason,
            prompt_tokens=self._finished.prompt_tokens,
            cached_tokens=self._finished.cached_tokens,
            seed=self._request.sampling.seed,
            statistics=self._finished.statistics,
            logprobs=[entry for text in self._texts for entry in text.logprobs],
        )


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> Iterable[Prompt]:
    """Return the prompts as a list; a text, or a list of messages, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    messages: list[Mapping[str, str]] = [
        prompt for prompt in prompts if isinstance(prompt, Mapping)
    ]
    if messages and len(messages) == len(prompts):
        return [messages]
    if messages:
        raise UsageError(
            "the prompts mix strings and messages: a conversation is a list of messages, "
            "several conversations are a list of such lists"
        )
    return [prompt for prompt in prompts if not isinstance(prompt, Mapping)]


def _report_trouble(status: ProcessStatus) -> None:
    """Log problems; Python's logging shows warnings on stderr unless configured otherwise."""
    if status.state in {"died", "lost"}:
        _log.warning("the %s %s (%s)", status.role, status.state, status.note)
