"""POST /v1/completions: OpenAI's original API for continuing a text."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any

import msgspec

from protocol.gateway import GatewaySettings
from protocol.messages import Logprobs, Sampling, ShownToken
from services.gateway.body import decode_body
from services.gateway.dialects.base import Reading, Reply, encode_event
from services.gateway.dialects.chat import CompletionFields, StreamOptions, read_completion_fields
from services.gateway.dialects.chat_reply import CompletionsReply, ShownLogprobs, finish_reason
from services.gateway.errors import invalid, refuse_value
from services.gateway.task import MAX_ANSWERS, Choice, PromptInput, Task
from services.gateway.transcript import Piece


class CompletionRequest(CompletionFields, frozen=True, kw_only=True):
    """The fields of a request."""

    prompt: str | list[Any]
    """A text, its tokens, or several of either."""
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: bool | Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None


def parse_completion(
    body: bytes, defaults: Sampling, *, strict: bool = False
) -> tuple[Task, CompletionRequest]:
    """Parse a body into a task; raises ApiError for what cannot be honoured."""
    request, unknown = decode_body(body, CompletionRequest, strict=strict)
    if (request.best_of or 1) > (request.n or 1):
        raise refuse_value("best_of", "choices are not ranked here; ask for n of them")
    prompts = _read_prompts(request.prompt, request.suffix or "")
    if len(prompts) * (request.n or 1) > MAX_ANSWERS:
        raise invalid("prompt", f"more than {MAX_ANSWERS} answers to one request")
    if request.echo and request.logprobs not in (None, False):
        raise refuse_value("echo", "log-probabilities of the prompt are not computed here")
    if request.echo and not all(prompt.text for prompt in prompts):
        raise refuse_value("echo", "only for prompts given as text")
    common = read_completion_fields(request, defaults, unknown)
    return Task(prompts=prompts, schema=request.json_schema, **common), request


def _read_prompts(prompt: str | list[Any], suffix: str) -> list[PromptInput]:
    """Return the texts or token lists of a prompt; `suffix` follows each continuation."""
    if isinstance(prompt, str):
        several: list[Any] = [prompt]
    else:
        several = prompt if not all(type(part) is int for part in prompt) else [prompt]
    if not several or not all(several):
        raise invalid("prompt", "it is empty")
    return [_read_prompt(one, suffix) for one in several]


def _read_prompt(prompt: Any, suffix: str) -> PromptInput:
    if isinstance(prompt, str):
        return PromptInput(text=prompt, suffix=suffix)
    if suffix:
        raise refuse_value("suffix", "only for prompts given as text")
    tokens = prompt if isinstance(prompt, list) else []
    if not tokens or not all(type(part) is int and 0 <= part < 2**31 for part in tokens):
        raise invalid("prompt", "a text or a list of token ids, or several of either")
    return PromptInput(tokens=tokens)


@dataclass
class TextReply(CompletionsReply):
    """Reply to POST /v1/completions."""

    echoes: list[str] = field(default_factory=list)
    """Text before each choice's own."""
    _lengths: Counter[int] = field(default_factory=Counter, init=False)
    """By choice, the number of characters before the next token."""

    prefix = "cmpl-"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def start(self) -> list[bytes]:
        """Return the echoed prompts; see `Reply`."""
        pairs = enumerate(self.echoes)
        return [
            encode_event(self._chunk(index, {"text": text, "logprobs": None}, None))
            for index, text in pairs
        ]

    def _entry(self, choice: Choice) -> dict[str, Any]:
        before = self.echoes[choice.index] if self.echoes else ""
        return {
            "index": choice.index,
            "text": before + choice.transcript.content,
            "logprobs": self._logprobs(choice, self._kept[choice.index]),
            "finish_reason": finish_reason(choice),
        }

    def _delta(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return {"text": "", "logprobs": None}
        shown = self._show_all(piece.logprobs)
        return {"text": piece.content, "logprobs": self._logprobs(choice, shown)}

    def _show(self, entry: Logprobs) -> ShownLogprobs:
        best = msgspec.json.encode({_name(t, entry): t.logprob for t in entry.best})
        return ShownLogprobs(entry.chosen.text, entry.chosen.logprob, msgspec.Raw(best))

    def _logprobs(self, choice: Choice, shown: list[ShownLogprobs]) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice's next tokens."""
        if not self._wants_logprobs:
            return None
        before = self._lengths[choice.index]
        *offsets, self._lengths[choice.index] = accumulate(
            (len(entry.token) for entry in shown), initial=before
        )
        return {
            "tokens": [entry.token for entry in shown],
            "token_logprobs": [entry.logprob for entry in shown],
            "top_logprobs": [entry.best for entry in shown],
            "text_offset": offsets,
        }


def _name(token: ShownToken, entry: Logprobs) -> str:
    """Return the text of a token, or for part of a character its bytes, as OpenAI does."""
    if token == entry.chosen or "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def read_completion(body: bytes, settings: GatewaySettings) -> Reading:
    """Parse a request to this API; raises ApiError for what cannot be honoured."""
    task, request = parse_completion(body, settings.sampling, strict=settings.strict)
    echoed = task.prompts if request.echo else ()

    def make_reply(model: str) -> Reply:
        return TextReply(
            model,
            prompts=len(task.prompts),
            options=request.stream_options or StreamOptions(),
            echoes=[prompt.text for prompt in echoed for _ in range(task.choices)],
        )

    return Reading(task, make_reply)
