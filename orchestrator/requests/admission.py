"""Admission: turn a client's message into a request, or explain why it cannot be decoded."""

import logging
from itertools import count
from typing import Self

import msgspec
from msgspec.structs import replace

from orchestrator.learning.cost_model import CostModel
from orchestrator.requests.request import Request
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import Sequence
from orchestrator.telemetry.recorder import Recorder
from orchestrator.text.stop_strings import StoppableText
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.sampling_params import check_sampling, uses_rejection
from protocol.errors import UsageError
from protocol.messages import Generate, Sampling, Tokens
from protocol.settings import OrchestratorSettings

_log = logging.getLogger(__name__)


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a request; 0 is unlimited."""

    max_prompt_tokens: int = 0
    max_stop_strings: int = 0
    max_stop_bytes: int = 0

    @classmethod
    def of(cls, settings: OrchestratorSettings) -> Self:
        """Return the limits in a stack's settings."""
        return cls(
            max_prompt_tokens=settings.max_prompt_tokens,
            max_stop_strings=settings.max_stop_strings,
            max_stop_bytes=settings.max_stop_bytes,
        )


class Admission:
    """Turns messages into requests and numbers their sequences."""

    def __init__(
        self,
        tokenizer: TargetTokenizer,
        vocabulary_size: int,
        estimates: CostModel,
        *,
        limits: AdmissionLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._estimates = estimates
        self._limits = limits or AdmissionLimits()
        self._numbers = count(1)

    def check(self, message: Generate) -> None:
        """Check everything that does not depend on the prompt; errors as for `admit`."""
        check_sampling(message.sampling)
        limit = self._limits.max_stop_strings
        if 0 < limit < len(message.stop):
            raise UsageError(
                f"{len(message.stop)} stop strings are more than this stack takes: {limit} "
                "(max_stop_strings)"
            )
        longest = max((len(string.encode()) for string in message.stop), default=0)
        limit = self._limits.max_stop_bytes
        if 0 < limit < longest:
            raise UsageError(
                f"a stop string of {longest} bytes is longer than this stack takes: {limit} "
                "(max_stop_bytes)"
            )

    def admit(
        self,
        peer: bytes,
        message: Generate,
        prompt: Tokens,
        *,
        context_length: int,
        memory_limit: str = "",
        now: float,
    ) -> Request:
        """Create a request that waits for its turn; `context_length` 0 is unlimited.

        `memory_limit`: the reason for the length, if memory limits it.

        Raises:
            UsageError: the prompt is empty, too long, or not of this vocabulary, or the
                sampling parameters are contradictory.
        """
        self._check_prompt(prompt, context_length, memory_limit)
        most_tokens = _count_most_tokens(message, len(prompt), context_length)
        sequence = Sequence(
            number=next(self._numbers),
            prompt=prompt,
            sampling=self._complete(message.sampling, len(prompt), most_tokens),
            limits=Limits(
                message.max_tokens, self._tokenizer.stop_ids, context_length, self._vocabulary_size
            ),
            planner=self._create_planner(message),
            recorder=_create_recorder(message, now),
        )
        sequence.recorder.planned = self._estimates.on_new_text(message.mode)
        marks = bool(message.tools) or message.special_text
        text = StoppableText(self._tokenizer.stream(marks=marks), message.stop)
        request = Request(peer, message.request, sequence, text, len(prompt))
        request.most_tokens = most_tokens
        request.wants_progress = message.progress
        request.is_background = message.is_background
        request.client, request.group = share_of(peer, message)
        _log.info("request of %d tokens, mode %s", len(prompt), message.mode, extra=request.ids)
        return request

    def _create_planner(self, message: Generate) -> Planner:
        return Planner(
            message.mode,
            self._estimates,
            message.num_draft_tokens,
            message.branches,
            sampled=uses_rejection(message.sampling),
            max_draft_tokens=message.max_draft_tokens,
            tree_nodes=message.tree_nodes,
        )

    def _complete(self, sampling: Sampling, prompt_length: int, most_tokens: int) -> Sampling:
        """Add the fields that the models need to process the logits of this request."""
        options = sampling.logits_options
        if options is None:
            return sampling
        largest = max((token for token, _ in options.logit_bias), default=0)
        if largest >= self._vocabulary_size:
            raise UsageError(f"logit_bias: token {largest} is not in the vocabulary")
        stop_ids = tuple(sorted(self._tokenizer.stop_ids))
        if options.grammar and not stop_ids:
            raise UsageError(
                "this model's files name no token that ends an answer (eos_token), so its answers "
                "cannot be bound to a schema, a grammar or a forced call"
            )
        return replace(
            sampling,
            logits_options=replace(
                options,
                answer_from=prompt_length,
                answer_until=most_tokens if options.grammar else 0,
                stop_ids=stop_ids,
            ),
        )

    def _check_prompt(self, prompt: Tokens, context_length: int, memory_limit: str) -> None:
        limit = self._limits.max_prompt_tokens
        if 0 < limit < len(prompt):
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, more than this stack takes: "
                f"{limit} (max_prompt_tokens)"
            )
        if not prompt:
            raise UsageError("the prompt is empty")
        if memory_limit and len(prompt) >= context_length:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, more than there is memory for: "
                f"{context_length} ({memory_limit}); shorten it"
            )
        if context_length and len(prompt) >= context_length:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, but the model's context holds "
                f"{context_length}; shorten it"
            )
        if max(prompt) >= self._vocabulary_size:
            raise UsageError(
                f"token {max(prompt)} is not in the vocabulary of {self._vocabulary_size}"
            )


def _create_recorder(message: Generate, now: float) -> Recorder:
    if not message.trace:
        return Recorder(now)
    from orchestrator.telemetry.timeline import Timeline  # noqa: PLC0415

    return Recorder(now, timeline=Timeline())


def share_of(peer: bytes, message: Generate) -> tuple[str, int]:
    """Return the client that the request counts for, and its group among that client's requests."""
    return message.client or peer.hex(), message.group or message.request


def _count_most_tokens(message: Generate, prompt_length: int, context_length: int) -> int:
    """Return the most tokens that its KV may hold at its end."""
    most = prompt_length + message.max_tokens
    return min(most, context_length) if context_length else most
