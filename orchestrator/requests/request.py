"""One request between its client and its sequence: its text so far, and the last messages."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

from orchestrator.registry import context_of
from orchestrator.sequence.actions import Action
from orchestrator.sequence.sequence import Sequence
from orchestrator.text.stop_strings import StoppableText
from protocol.messages import (
    DraftTree,
    Finished,
    FinishReason,
    Hello,
    Prefilled,
    Progress,
    Role,
    Text,
    TokenLogprobs,
    TokenOrigin,
    Tokens,
)
from protocol.process.logs import about

_log = logging.getLogger(__name__)


@dataclass
class Request:
    """What a client asked for, while it is answered or waits."""

    peer: bytes
    number: int
    """The client's own number of it."""
    sequence: Sequence
    text: StoppableText
    prompt_tokens: int
    digest: bytes = bytes(16)
    """Names the request in the crash journal."""
    most_tokens: int = 0
    """What its KV may have to hold at its end."""
    cached_tokens: int | None = None
    """Prompt tokens that the target did not have to compute; None while it computes."""
    computed_tokens: int = 0
    """Prompt tokens that the target has, while it computes."""
    wants_progress: bool = False
    """Whether its client wants to know that."""
    frames: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Outcome of the verification in flight -> the encoded `Verify` that it leads to."""
    deadline: float | None = None
    """When to stop waiting for the service that the sequence waits for."""
    is_stopped: bool = False
    """A stop string is complete; what the round in flight adds is not part of the answer."""
    is_unreachable: bool = False
    """A message did not reach the client, which will ask again."""
    client: str = ""
    """With whose requests it shares."""
    group: int = 0
    """Shared by all answers to one of that client's requests."""
    is_background: bool = False
    """Others may go before it."""
    is_over: bool = False
    """Its client got the last message."""
    open_at: set[Role] = field(default_factory=set)
    """The services that it was opened at."""
    has_had_drafter: bool = False
    """A drafter worked for it; the next one is a replacement."""
    has_drafter_ban: bool = False
    """Drafters died of it: it is decoded without one."""

    @property
    def is_plain(self) -> bool:
        """Whether no drafter was asked for."""
        return self.sequence.planner.mode == "ar"

    @property
    def draws(self) -> bool:
        """Whether its drafts carry the distributions that they were drawn from."""
        return self.sequence.planner.sampled

    # ------------------------------------------------------------ services

    def on_service_up(self, hello: Hello) -> list[Action]:
        """It meets a service for the first time."""
        if hello.role == "drafter":
            self.has_had_drafter = True
            self.sequence.recorder.drafter = f"{hello.backend} {Path(hello.model).name}".strip()
            return self.sequence.on_drafter_up(hello.context_length, takes_trees=hello.takes_trees)
        self.sequence.recorder.rewinding = hello.rewinding
        actions = self.sequence.limit_context(context_of(hello))
        return actions + self.sequence.on_verifier_up(
            hello.max_draft_tokens, takes_trees=hello.takes_trees
        )

    def on_service_replaced(self, hello: Hello) -> list[Action]:
        """A service takes the place of another while the request runs."""
        if hello.role == "verifier":
            self.sequence.recorder.verifier_restarts += int(self.sequence.round > 0)
        else:
            self.sequence.recorder.drafter_restarts += int(self.has_had_drafter)
        return self.on_service_lost(hello.role, "drafter_swapped")

    def on_service_lost(self, role: Role, reason: str) -> list[Action]:
        """A service is gone; `reason` is counted if the target waited for a draft."""
        self.open_at.discard(role)
        if role == "drafter":
            return self.sequence.on_drafter_lost(reason)
        self.sequence.on_verifier_lost()
        self.deadline = None
        return []

    def suspend(self) -> list[Action]:
        """Give its memory to others; it goes on from its committed tokens."""
        self.open_at.clear()
        self.frames.clear()
        return self.sequence.suspend()

    def on_tree(self, tree: DraftTree, now: float) -> list[Action]:
        """The drafter sent one depth."""
        self.sequence.recorder.add_tree(tree, now)
        return self.sequence.on_tree(tree, now)

    def on_prefilled(self, message: Prefilled, role: Role, now: float) -> list[Action]:
        """A service has computed the tokens so far; again after each restart."""
        self.sequence.recorder.add_prefill(role, message, now)
        if role == "drafter":
            self.sequence.on_drafter_filled()
        if role == "verifier" and self.cached_tokens is None:
            self.cached_tokens = min(message.cached, self.prompt_tokens)
        return []

    # ------------------------------------------------------------ the client

    def add_tokens(
        self, tokens: Tokens, origins: list[TokenOrigin], logprobs: Iterable[TokenLogprobs] = ()
    ) -> Text:
        """The message for newly emitted tokens, cut after the one that completes a stop string."""
        _log.debug("%d tokens", len(tokens), extra=self.ids)
        pieces: list[str] = []
        for token, entry in zip(tokens, chain(logprobs, repeat(None)), strict=False):
            pushed = self.text.push(token, entry)
            pieces.append(pushed.text)
            if pushed.stopped:
                self.is_stopped = True
                break
        used = len(pieces)
        self.sequence.recorder.retract(origins[used:])
        return Text(
            request=self.number,
            tokens=tokens[:used],
            origins=origins[:used],
            pieces=pieces,
            logprobs=self.text.take_logprobs(),
        )

    def on_prefill_progress(self, length: int) -> Progress | None:
        """The target has computed a part of the prompt; what its client is to know of that."""
        self.computed_tokens = min(length, self.prompt_tokens)
        if not self.wants_progress:
            return None
        return Progress(
            request=self.number,
            prompt_tokens=self.prompt_tokens,
            computed=self.computed_tokens,
            cached=self.cached_tokens or 0,
        )

    def last_messages(self, reason: FinishReason, error: str) -> list[Text | Finished]:
        """Text that was held back until the end, and the end itself.

        Nothing for a client that missed something: to it, an end would look like a whole answer.
        """
        if self.is_stopped and reason in ("length", "context"):
            reason = "stop"  # the stop string is complete before the last token
        _log.info("request ends: %s %s", reason, error, extra=self.ids)
        if self.is_unreachable:
            return []
        rest = "" if self.is_stopped else self.text.flush()
        logprobs = self.text.take_logprobs()
        held = [
            Text(request=self.number, tokens=[], origins=[], pieces=[rest], logprobs=logprobs)
            for _ in range(bool(rest or logprobs))
        ]
        return [*held, self._create_finished(reason, error)]

    def _create_finished(self, reason: FinishReason, error: str) -> Finished:
        recorder = self.sequence.recorder
        return Finished(
            request=self.number,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            statistics=recorder.summarise(),
            histograms=recorder.histograms(),
            error=error,
            stop_string=self.text.stop_string,
            timeline=recorder.timeline.events if recorder.timeline is not None else [],
        )

    @property
    def ids(self) -> dict[str, dict[str, int | str]]:
        """What its log entries carry."""
        sequence = self.sequence
        return about(request=self.number, sequence=sequence.number, round=sequence.round)
