"""Messages between the orchestrator and the process that tokenises long prompts."""

from typing import Any

from protocol.messages import ChatMessage, Message, Tokens


class EncodePrompt(Message, frozen=True, tag="encode", kw_only=True):
    """Orchestrator -> worker: render and tokenise; the fields are those of `Generate`."""

    messages: list[ChatMessage] = []
    text: str = ""
    tools: list[dict[str, Any]] = []
    template_options: dict[str, Any] = {}
    answer_tokens: Tokens = []
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
