"""Messages between the orchestrator and the process that tokenises long prompts."""

from typing import Any

import msgspec

from protocol.messages import ChatMessage, Message, Tokens


class EncodePrompt(Message, frozen=True, tag="encode", kw_only=True):
    """Orchestrator -> worker: render and tokenise; the fields are those of `Generate`."""

    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    text: str = ""
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    template_options: dict[str, Any] = msgspec.field(default_factory=dict)
    answer_tokens: Tokens = msgspec.field(default_factory=list)
    answer_start: str = ""


class WorkerReady(Message, frozen=True, tag="ready"):
    """Worker -> orchestrator: the tokenizer is loaded."""


class PromptTokens(Message, frozen=True, tag="tokens", kw_only=True):
    """Worker -> orchestrator: the prompt."""

    tokens: Tokens


class PromptRejected(Message, frozen=True, tag="rejected", kw_only=True):
    """Worker -> orchestrator: the prompt cannot be made, for this reason."""

    reason: str


FromPromptWorker = WorkerReady | PromptTokens | PromptRejected
