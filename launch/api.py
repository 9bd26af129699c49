"""`LLM`: a stack of one's own behind a Python object."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from launch.config import stack_settings
from launch.generate import new_seed
from launch.session import private_stack
from protocol.client import Client
from protocol.closing import Closing
from protocol.errors import UsageError
from protocol.messages import (
    Acceptance,
    ChatMessage,
    Finished,
    FinishReason,
    Generate,
    Mode,
    ProcessStatus,
    Sampling,
    Statistics,
    Text,
    Tokens,
)
from protocol.sampling import check


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer; the names are those of the command line. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """None draws one; the same seed gives the same answer in every mode if coupled."""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    mode: Mode = "ssd"
    acceptance: Acceptance = "coupled"
    """coupled: the tokens of plain decoding; rejection: their law."""
    draft_temp: float | None = None
    """The drafter's own temperature; None is the target's."""
    draft_top_p: float | None = None
    saguaro_c: float = 1.0
    """Rejection: the draft's weight for tokens that are prepared for; 1 is off."""

    def request(self, number: int, prompt: str) -> Generate:
        """The orchestrator's request for one prompt; raises UsageError if a value is invalid."""
        try:
            request = msgspec.convert(
                {
                    "type": "generate",
                    "request": number,
                    "messages": [msgspec.to_builtins(ChatMessage("user", prompt))],
                    "sampling": msgspec.to_builtins(self._sampling()),
                    "max_tokens": self.max_tokens,
                    "stop": list(self.stop),
                    "mode": self.mode,
                },
                Generate,
            )
        except msgspec.ValidationError as error:
            raise UsageError(f"SamplingParams: {error}") from error
        check(request.sampling)
        return request

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=new_seed() if self.seed is None else self.seed,
            acceptance=self.acceptance,
            draft_temperature=self.draft_temp,
            draft_top_p=self.draft_top_p,
            saguaro=self.saguaro_c,
        )


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One complete answer."""

    text: str
    tokens: Tokens
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    statistics: Statistics


class LLM(Closing):
    """A loaded pair. Use it as a context manager, or call `close`: it owns processes.

    Args:
        model: target folder or hub name; the default pair's target if left out.
        draft_model: drafter folder or hub name.
        settings: any other setting of a stack, as in `ssd.toml`.

    Raises:
        SsdError: the stack cannot be started; the message says why.
    """

    def __init__(self, model: str = "", draft_model: str = "", **settings: Any) -> None:
        given = {"model": model, "draft_model": draft_model, **settings}
        flags = {key: value for key, value in given.items() if value != ""}
        self._exit = contextlib.ExitStack()
        supervisor = self._exit.enter_context(private_stack(stack_settings(flags), _silent))
        client = Client(supervisor.run_dir.clients_address)
        self._client = self._exit.enter_context(contextlib.closing(client))

    def generate(
        self, prompts: Sequence[str], params: SamplingParams | None = None
    ) -> list[Answer]:
        """Answer each prompt in turn."""
        return [self._answer(prompt, params or SamplingParams()) for prompt in prompts]

    def stream(
        self, prompt: str, params: SamplingParams | None = None
    ) -> Generator[Text | Finished]:
        """Stream one answer: Text events, then Finished with the statistics.

        Closing the generator early cancels the request.
        """
        request = (params or SamplingParams()).request(self._client.number(), prompt)
        return self._client.generate(request)

    def _answer(self, prompt: str, params: SamplingParams) -> Answer:
        request = params.request(self._client.number(), prompt)
        text, tokens = "", list[int]()
        for event in self._client.generate(request):
            if isinstance(event, Text):
                text += event.text
                tokens += event.tokens
            else:
                return Answer(
                    text=text,
                    tokens=tokens,
                    finish_reason=event.reason,
                    prompt_tokens=event.prompt_tokens,
                    seed=request.sampling.seed,
                    statistics=event.statistics,
                )
        raise AssertionError("an answer ends with Finished")

    def close(self) -> None:
        """Stop all processes; safe to call twice."""
        self._exit.close()


def _silent(status: ProcessStatus) -> None:
    del status
