"""The fields that requests may have. Anything else is refused, never ignored.

OpenAI's, as far as a local model can honour them, and the extensions that other local
servers share: top_k, min_p, repetition_penalty, chat_template_kwargs, draft_model and
num_draft_tokens.
"""

from typing import Annotated, Any, Literal

import msgspec

UNSET = msgspec.UNSET
Unset = msgspec.UnsetType


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TextPart(_Strict, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A piece of a message's content."""

    text: str


class FunctionCall(_Strict, frozen=True, kw_only=True):
    """What the assistant called."""

    name: str
    arguments: str


class ToolCall(_Strict, frozen=True, kw_only=True):
    """One call in an assistant's message of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Turn(_Strict, frozen=True, kw_only=True):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None


class ToolFunction(_Strict, frozen=True, kw_only=True):
    """What a tool is."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict, frozen=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(_Strict, frozen=True, kw_only=True):
    """Names a function."""

    name: str


class ToolChoice(_Strict, frozen=True, kw_only=True):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(_Strict, frozen=True, kw_only=True):
    """A schema that the answer must follow."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict, frozen=True, kw_only=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(_Strict, frozen=True, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool = False
    include_origins: bool = False
    """Extension: per chunk, where each token came from and the piece of text it completed."""


class _Request(_Strict, frozen=True, kw_only=True):
    """What both kinds of request share. None is the same as not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    seed: int | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]],
            msgspec.Meta(max_length=1024),
        ]
        | None
    ) = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=16)] | None = None
    user: str | None = None
    draft_model: str | Unset | None = UNSET
    """null: plain decoding."""
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    """0: plain decoding."""


class ChatRequest(_Request, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Request, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
