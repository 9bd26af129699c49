"""The client's side of a request: who asked, the text so far, and what goes back to them."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from orchestrator.sequence.phase import Phase
from orchestrator.sequence.sequence import Sequence
from orchestrator.text.stop_strings import StoppableText
from protocol.messages import (
    Finished,
    FinishReason,
    Origin,
    Prefilled,
    Role,
    Text,
    TokenLogprobs,
    Tokens,
)
from protocol.process.logs import about

_log = logging.getLogger(__name__)


@dataclass
class Request:
    """One request between a client and its sequence."""

    peer: bytes
    request: int
    sequence: Sequence
    text: StoppableText
    prompt_tokens: int
    most_tokens: int = 0
    """What its KV may have to hold at its end."""
    cached_tokens: int | None = None
    """Prompt tokens that the target did not have to compute; None while it computes."""
    frames: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Outcome of the verification in flight -> the encoded `Verify` that it leads to."""
    deadline: float | None = None
    """When to stop waiting for the service that the sequence waits for."""
    stopped: bool = field(default=False)
    """A stop string is complete; what the round in flight adds is not part of the answer."""
    unheard: bool = field(default=False)
    """Something did not reach the client, who will ask again."""

    def push(
        self, tokens: Tokens, origins: list[Origin], logprobs: Iterable[TokenLogprobs] = ()
    ) -> Text:
        """The message for newly emitted tokens, cut after the one that completes a stop string."""
        ids = about(request=self.request, sequence=self.sequence.number, round=self.sequence.round)
        _log.debug("%d tokens", len(tokens), extra=ids)
        pieces: list[str] = []
        for token in tokens:
            pushed = self.text.push(token)
            pieces.append(pushed.text)
            if pushed.stopped:
                self.stopped = True
                break
        used = len(pieces)
        drafted = sum(origin != "target" for origin in origins[used:])
        self.sequence.recorder.retract(len(tokens) - used, drafted)
        pairs = zip(tokens[:used], logprobs, strict=False)
        return Text(
            request=self.request,
            tokens=tokens[:used],
            origins=origins[:used],
            pieces=pieces,
            logprobs=[self.text.shown(token, entry) for token, entry in pairs],
        )

    def expect(self, verify_wait_s: float, draft_wait_s: float, now: float) -> None:
        """Set the deadline of whatever the sequence now waits for."""
        match self.sequence.phase:
            case Phase.VERIFYING:
                self.deadline = now + verify_wait_s
                if self.sequence.recorder.verifying_since is None:
                    self.sequence.recorder.verifying_since = now
            case Phase.DRAFTING:
                self.deadline = now + draft_wait_s
            case Phase.STRANDED | Phase.FINISHED:
                self.deadline = None

    def prefilled(self, message: Prefilled, role: Role, now: float) -> None:
        """A service has taken in the tokens so far; again after each restart."""
        self.sequence.recorder.prefilled(role, message, now)
        if role == "verifier" and self.cached_tokens is None:
            self.cached_tokens = min(message.cached, self.prompt_tokens)

    def farewell(self, reason: FinishReason, error: str) -> Iterator[Text | Finished]:
        """Text that was held back until the end, and the last message.

        Nothing for a client that missed something: to it, an end would look like a whole answer.
        """
        finished = self._finished(reason, error)
        if self.unheard:
            return
        rest = "" if self.stopped else self.text.flush()
        if rest:
            yield Text(request=self.request, tokens=[], origins=[], pieces=[rest])
        yield finished

    def _finished(self, reason: FinishReason, error: str) -> Finished:
        ids = about(request=self.request, sequence=self.sequence.number, round=self.sequence.round)
        _log.info("request ends: %s %s", reason, error, extra=ids)
        timeline = self.sequence.recorder.timeline
        return Finished(
            request=self.request,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            statistics=self.sequence.recorder.summary(),
            stop_string=self.text.stop_string,
            histograms=self.sequence.recorder.histograms(),
            error=error,
            timeline=timeline.slices if timeline is not None else [],
        )


def time_left(answers: Iterable[Request], at_most: float, now: float) -> float:
    """Seconds until the first deadline among these, between 0 and `at_most`."""
    deadlines = [answer.deadline for answer in answers if answer.deadline is not None]
    return max(0.0, min([at_most, *(deadline - now for deadline in deadlines)]))
