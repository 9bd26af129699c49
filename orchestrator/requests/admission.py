"""From a client's request to a sequence that can be decoded, or a sentence why not."""

import logging

from msgspec.structs import replace

from orchestrator.learning.cost_model import CostModel
from orchestrator.requests.request import Request
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import Sequence
from orchestrator.telemetry.recorder import Recorder
from orchestrator.telemetry.timeline import Timeline
from orchestrator.text.stop_strings import StoppableText
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.sampling_params import (
    check_sampling,
    drafter_sampling,
    is_greedy,
    uses_rejection,
)
from protocol.errors import UsageError
from protocol.messages import Generate, Sampling, Tokens
from protocol.process.logs import about

_log = logging.getLogger(__name__)


def admit(
    request: Generate,
    *,
    peer: bytes,
    number: int,
    tokenizer: TargetTokenizer,
    vocabulary_size: int,
    context_length: int,
    max_prompt_tokens: int = 0,
    estimates: CostModel,
    now: float,
) -> Request:
    """The answer to be, under the sequence number `number`; `context_length` 0 is unlimited.

    Raises:
        UsageError: the prompt is empty, too long, or not of this vocabulary, or the sampling
            parameters contradict each other.
    """
    check_sampling(request.sampling)
    sampling, tried = _saguaro(request, estimates)
    prompt = _prompt(request, tokenizer)
    if 0 < max_prompt_tokens < len(prompt):
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, more than this stack takes: "
            f"{max_prompt_tokens} (max_prompt_tokens)"
        )
    _check_prompt(prompt, context_length, vocabulary_size)
    estimates.new_text(request.mode)
    sequence = Sequence(
        number=number,
        prompt=prompt,
        sampling=_shaped(sampling, len(prompt), tokenizer, vocabulary_size),
        limits=Limits(request.max_tokens, tokenizer.stop_ids, context_length, vocabulary_size),
        plan=Planner(
            request.mode,
            estimates,
            request.num_draft_tokens,
            request.branches,
            request.fan_out_policy,
            sampled=uses_rejection(sampling),
            tried_saguaro=tried,
        ),
        recorder=Recorder(
            now,
            timeline=Timeline() if request.trace else None,
        ),
    )
    ids = about(request=request.request, sequence=number)
    _log.info("request of %d tokens, mode %s", len(prompt), request.mode, extra=ids)
    text = StoppableText(
        tokenizer.stream(marks=bool(request.tools) or request.special_text), request.stop
    )
    most_tokens = len(prompt) + request.max_tokens
    if context_length:
        most_tokens = min(most_tokens, context_length)
    return Request(peer, request.request, sequence, text, len(prompt), most_tokens)


def _shaped(
    sampling: Sampling, prompt_length: int, tokenizer: TargetTokenizer, vocabulary_size: int
) -> Sampling:
    """With what the models need to know of this request to shape its logits."""
    shape = sampling.logits_options
    if shape is None:
        return sampling
    largest = max((token for token, _ in shape.logit_bias), default=0)
    if largest >= vocabulary_size:
        raise UsageError(f"logit_bias: token {largest} is not in the vocabulary")
    stop_ids = tuple(sorted(tokenizer.stop_ids))
    shape = replace(shape, answer_from=prompt_length, stop_ids=stop_ids)
    return replace(sampling, logits_options=shape)


def _saguaro(request: Generate, estimates: CostModel) -> tuple[Sampling, float | None]:
    """The sampling with its C chosen, if that was left to us, and the choice."""
    if not request.choose_saguaro:
        return request.sampling, None
    if request.sampling.acceptance != "rejection":
        raise UsageError("--saguaro-c auto needs --acceptance rejection")
    if not uses_rejection(request.sampling) or is_greedy(drafter_sampling(request.sampling)):
        return request.sampling, None  # nothing is drawn
    weight = estimates.saguaro.choose()
    return replace(request.sampling, saguaro=weight), weight


def _prompt(request: Generate, tokenizer: TargetTokenizer) -> Tokens:
    if request.tokens:
        return request.tokens
    if request.text:
        return tokenizer.encode_text(request.text)
    prompt = tokenizer.encode(request.messages, request.tools, request.template_options)
    return prompt + request.answer_tokens + tokenizer.encode_part(request.answer_start)


def _check_prompt(prompt: Tokens, context_length: int, vocabulary_size: int) -> None:
    if not prompt:
        raise UsageError("the prompt is empty")
    if context_length and len(prompt) >= context_length:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, but the model's context holds "
            f"{context_length}; shorten it"
        )
    if max(prompt) >= vocabulary_size:
        raise UsageError(f"token {max(prompt)} is not in the vocabulary of {vocabulary_size}")
