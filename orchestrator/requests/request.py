"""One request between its client and its sequence: its text so far, and its last messages."""

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
    PrefillProgress,
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
    """A client's request while it is answered or waits."""

    peer: bytes
    number: int
    """The client's number for it."""
    sequence: Sequence
    text: StoppableText
    prompt_tokens: int
    digest: bytes = bytes(16)
    """Identifies the request in the crash journal."""
    most_tokens: int = 0
    """Most tokens that its KV may hold at its end."""
    is_filled: bool = False
    """True once the target has the prompt."""
    cached_tokens: int = 0
    """Prompt tokens that the target did not have to compute."""
    computed_tokens: int = 0
    """Prompt tokens that the target has, while it computes."""
    wants_progress: bool = False
    """True if its client asked for prefill progress."""
    deadline: float | None = None
    """End of the wait for the service that the sequence waits for."""
    is_stopped: bool = False
    """True once a stop string is complete; the round in flight adds nothing to the answer."""
    is_unreachable: bool = False
    """True if a message did not reach the client, which will retry."""
    client: str = ""
    """The client that its share is counted for."""
    group: int = 0
    """Shared by all answers to one of that client's requests."""
    is_background: bool = False
    """True if other requests may overtake it."""
    is_over: bool = False
    """True once its client got the last message."""
    open_at: set[Role] = field(default_factory=set)
    """The services that it was opened at."""
    has_had_drafter: bool = False
    """True once a drafter worked for it; the next one is a replacement."""
    has_drafter_ban: bool = False
    """True if drafters died of it: it is decoded without one."""

    @property
    def is_plain(self) -> bool:
        """True if it uses no drafter."""
        return self.sequence.planner.mode == "ar"

    @property
    def draws(self) -> bool:
        """True if its drafts carry the distributions that they were sampled from."""
        return self.sequence.planner.sampled

    # ------------------------------------------------------------ services

    def on_service_up(self, hello: Hello) -> list[Action]:
        """Open the sequence at a service that it meets for the first time."""
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
        """Move the sequence to a service that replaces another one."""
        if hello.role == "verifier":
            self.sequence.recorder.verifier_restarts += int(self.sequence.round > 0)
        else:
            self.sequence.recorder.drafter_restarts += int(self.has_had_drafter)
        return self.on_service_lost(hello.role, "drafter_swapped")

    def on_service_lost(self, role: Role, reason: str) -> list[Action]:
        """Handle the loss of a service; `reason` is counted if the target waited for a draft."""
        self.open_at.discard(role)
        if role == "drafter":
            return self.sequence.on_drafter_lost(reason)
        self.sequence.on_verifier_lost()
        self.deadline = None
        return []

    def suspend(self) -> list[Action]:
        """Release its memory; it resumes from its committed tokens."""
        self.open_at.clear()
        return self.sequence.suspend()

    def on_tree(self, tree: DraftTree, now: float) -> list[Action]:
        """Handle one depth of a draft."""
        self.sequence.recorder.add_tree(tree, now)
        return self.sequence.on_tree(tree, now)

    def on_prefilled(self, message: Prefilled, role: Role, now: float) -> list[Action]:
        """Handle a completed prefill: at the start, and again after each restart."""
        self.sequence.recorder.add_prefill(role, message, now)
        if role == "drafter":
            self.sequence.on_drafter_filled()
        if role == "verifier":
            self._note_cached(message.cached)
            self.is_filled = True
        return []

    def _note_cached(self, tokens: int) -> None:
        """Record how much of the prompt was cached; what a restart reuses does not count."""
        if not self.is_filled:
            self.cached_tokens = min(tokens, self.prompt_tokens)

    # ------------------------------------------------------------ the client

    def add_tokens(
        self, tokens: Tokens, origins: list[TokenOrigin], logprobs: Iterable[TokenLogprobs] = ()
    ) -> Text:
        """Return the message for new tokens, cut after the one that completes a stop string."""
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

    def on_prefill_progress(self, message: PrefillProgress | Prefilled) -> Progress | None:
        """Handle prefill progress; return the message for a client that wants it."""
        self.computed_tokens = min(message.length, self.prompt_tokens)
        self._note_cached(message.cached)
        if not self.wants_progress:
            return None
        return Progress(
            request=self.number,
            prompt_tokens=self.prompt_tokens,
            computed=self.computed_tokens,
            cached=self.cached_tokens,
        )

    def last_messages(self, reason: FinishReason, error: str) -> list[Text | Finished]:
        """Return the text that was held back until the end, and the end itself.

        Empty for a client that missed a message: an end would make its answer look complete.
        """
        if self.is_stopped and reason in ("length", "context"):
            reason = "stop"  # the stop string is complete before the last token
        _log.info("request ends: %s", f"{reason}: {error}" if error else reason, extra=self.ids)
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
            cached_tokens=self.cached_tokens,
            statistics=recorder.summarise(),
            histograms=recorder.histograms(),
            error=error,
            stop_string=self.text.stop_string,
            timeline=recorder.timeline.events if recorder.timeline is not None else [],
        )

    @property
    def ids(self) -> dict[str, dict[str, int | str]]:
        """Fields of its log entries."""
        sequence = self.sequence
        return about(request=self.number, sequence=sequence.number, round=sequence.round)
