"""The token form of a target's conversations, between whose parts `ssd distill` samples."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from launch.prompts import read_prompts
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.tokens import common_prefix_length
from protocol.errors import UsageError
from protocol.jobs.distill import TokenPrompt
from protocol.messages import ChatMessage, Tokens

_PROBES = ("Why", "go", "7")
"""Words that differ in every token: the common part of their conversations is the template."""


class Form(NamedTuple):
    """The template's tokens around the user's words."""

    opening: Tokens
    turn: Tokens
    """Empty if the model has no chat template; texts then start at `opening`."""


def form_of(tokenizer: TargetTokenizer) -> Form:
    """Return the form of a model's conversations.

    Raises:
        UsageError: the model has neither a chat template nor a token that begins texts.
    """
    if not tokenizer.has_template:
        if tokenizer.bos_id is None:
            raise UsageError(
                "the target has neither a chat template nor a beginning-of-text token; "
                "give your own prompts with --prompts"
            )
        return Form([tokenizer.bos_id], [])
    probes = [tokenizer.encode([ChatMessage("user", probe)]) for probe in _PROBES]
    opening = probes[0][: common_prefix_length(*probes)]
    endings = [probe[len(opening) :][::-1] for probe in probes]
    turn = endings[0][: common_prefix_length(*endings)][::-1]
    if not opening or not turn:
        raise UsageError(
            "the target's chat template does not frame the user's words; "
            "give your own prompts with --prompts"
        )
    return Form(opening, turn)


def tokenise(source: Path, tokenizer: TargetTokenizer, destination: Path) -> None:
    """Apply the chat template to the prompts of a JSONL file, one `TokenPrompt` a line.

    Raises:
        UsageError: the file cannot be read, or a line is not a prompt.
    """
    encoded = []
    for prompt in read_prompts(source):
        tokens = tokenizer.encode([ChatMessage("user", prompt.prompt)])
        encoded.append(msgspec.json.encode(TokenPrompt(tokens, prompt.category)))
    destination.write_bytes(b"\n".join(encoded))
