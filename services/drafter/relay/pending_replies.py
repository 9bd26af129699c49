"""Replies that a drafting program owes; pure, the clock is the caller's.

An opened sequence is owed `Prefilled`, a `DraftNow` a `DraftTree`; anything else may stay
unanswered. A heartbeat also counts as a reply: the program is late then, but does not hang. Replies
to a closed sequence are no longer owed, but the program's silence is still counted: otherwise a
hanging program would outlive any number of short answers. Messages of finished rounds are
recognised here and dropped.
"""

from dataclasses import dataclass, field

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import (
    CloseSequence,
    DraftNow,
    DraftTree,
    Failed,
    FromDrafter,
    Heartbeat,
    Hello,
    OpenSequence,
    Prefilled,
    Prepare,
    ToService,
)


@dataclass
class _Sequence:
    opened: float
    asked_at: float
    """Time of the last request, or of its last partial answer."""
    round: int = 0
    """The newest round of a request."""
    opening: bool = True
    drafting: bool = False
    """True if the last request was `DraftNow`, for which the target waits."""
    owed: float | None = None
    """Time since when a draft is owed; newer requests do not reset it."""
    owed_round: int = 0

    def ask(self, message: Prepare | DraftNow, now: float) -> None:
        """Record the next request."""
        self.round, self.asked_at = message.round, now
        self.drafting = isinstance(message, DraftNow)
        if self.drafting and self.owed is None:
            self.owed, self.owed_round = now, message.round

    @property
    def owed_since(self) -> float | None:
        """Time since when its prefill or a draft is owed; None if nothing is."""
        return self.opened if self.opening else self.owed

    def pay(self, now: float) -> None:
        """Record a sign of life; if the target still waits, the next part is owed from now on."""
        if self.owed is not None:
            self.owed = now if self.drafting else None
            self.owed_round = self.round


@dataclass
class PendingReplies:
    """The replies owed by one program."""

    prefill_s: float
    """Longest wait for `Prefilled`; and how long in total a program may owe answers to sequences
    that were closed meanwhile, without a sign of life.
    """
    draft_s: float
    """Longest wait for a tree that the target waits for."""
    stale: int = 0
    """Number of dropped messages."""
    _open: dict[int, _Sequence] = field(default_factory=dict)
    _news: float = 0.0
    """Time of the program's last sign of life."""
    _silent_s: float = 0.0
    """Time since then during which it owed something to sequences that are closed now."""
    _counted: float = 0.0
    """Time up to which that is counted."""
    _closed: set[int] = field(default_factory=set)
    """Sequences that were owed something when they were closed, and have got nothing since."""

    @property
    def sequences(self) -> list[int]:
        """The open sequences."""
        return list(self._open)

    def note_request(self, message: ToService, now: float) -> None:
        """Record a message sent to the program."""
        match message:
            case OpenSequence(sequence=number):
                self._open[number] = _Sequence(opened=now, asked_at=now)
            case CloseSequence(sequence=number):
                self._count_silence(number, now)
                self._open.pop(number, None)
            case Prepare() | DraftNow():
                if known := self._open.get(message.sequence):
                    known.ask(message, now)
            case _:
                pass  # of no sequence

    def filter_reply(self, message: FromDrafter, now: float) -> FromDrafter | None:
        """Return the part of a message from the program to pass on; None if there is none.

        Raises:
            ProtocolError: it must not send this now.
        """
        match message:
            case Hello():
                raise ProtocolError("a second Hello")
            case Heartbeat():
                self._lives(now)
                return None
            case Prefilled() | Failed() | DraftTree():
                known = self._open.get(message.sequence)
                answer = None if known is None else self._about(known, message, now)
                self.stale += answer is None
                if message.sequence in self._closed:
                    self._hear(now)  # too late to be of use, but a requested answer
                return answer

    def _count_silence(self, number: int, now: float) -> None:
        """Before this sequence is closed, count the silence since a reply was first owed."""
        if number in self._open and self._open[number].owed_since is not None:
            owed = [since for one in self._open.values() if (since := one.owed_since) is not None]
            self._silent_s += now - max(min(owed), self._news, self._counted)
            self._counted = now
            self._closed.add(number)

    def _hear(self, now: float) -> None:
        self._news, self._silent_s = now, 0.0
        self._closed.clear()

    def _lives(self, now: float) -> None:
        self._hear(now)
        for known in self._open.values():
            known.pay(now)

    def _about(
        self, known: _Sequence, message: Prefilled | Failed | DraftTree, now: float
    ) -> FromDrafter | None:
        match message:
            case Prefilled():
                known.opening = False
            case Failed():
                del self._open[message.sequence]
            case DraftTree():
                if message.round not in (known.round, known.owed_round):
                    return None
                current = message.round == known.round
                known.drafting = known.drafting and not (current and message.last)
                known.pay(now)
                if not current:
                    return None
                message = _clamp_draft_ms(message, 1e3 * (now - known.asked_at))
        known.asked_at = now
        self._hear(now)
        return message

    def overdue(self, now: float) -> str | None:
        """Return the limit that it has exceeded, if any."""
        opening = [s.opened for s in self._open.values() if s.opening]
        # A single-threaded program cannot draft while it prefills.
        since = opening or [s.owed for s in self._open.values() if s.owed is not None]
        limit = self.prefill_s if opening else self.draft_s
        if any(now - max(began, self._news) > limit for began in since):
            what = "prefill" if opening else "draft"
            knob = "start_timeout_s" if opening else "draft_timeout_s"
            return f"no {what} within {limit:g} s ({knob})"
        heard = max(self._news, self._counted)
        silent = self._silent_s + max((now - max(began, heard) for began in since), default=0.0)
        if self._silent_s and silent > self.prefill_s:
            return f"no answer to several requests in {self.prefill_s:g} s (start_timeout_s)"
        return None


def _clamp_draft_ms(tree: DraftTree, worked_ms: float) -> DraftTree:
    """Return the tree with a plausible time: the planner learns from it for all requests."""
    if 0.0 <= tree.draft_ms <= worked_ms:
        return tree
    return msgspec.structs.replace(tree, draft_ms=worked_ms)
