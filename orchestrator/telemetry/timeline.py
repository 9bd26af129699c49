"""Timeline of one request: the events of each process for `ssd generate --trace`.

Every process reads the same clock: Python's `time.monotonic` is CLOCK_MONOTONIC on Linux and
mach_absolute_time on macOS, which count for the whole machine. A service on another machine has
another clock; its events end when their message arrived.
"""

from protocol.messages import DraftTree, Prefilled, Role, TraceEvent, Track, VerificationOutcome

_SAME_CLOCK_S = 30.0
"""An event further from the present was stamped by another machine's clock; on a busy machine local
messages wait for seconds.
"""


class Timeline:
    """Collects events; times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def add_prefill(self, role: Role, message: Prefilled, now: float) -> None:
        """Add a service's computation of the prompt."""
        ended = _end_of(message.at_ns, now)
        details = {"tokens": message.length, "cached": message.cached}
        self.add(role, "prefill", ended - message.prefill_ms / 1e3, ended, details)

    def add_verification(
        self,
        outcome: VerificationOutcome,
        tokens: int,
        depth: int,
        origin: str,
        now: float,
    ) -> None:
        """Add a verification of `tokens` tokens: a chain, or a tree of this depth."""
        ended = _end_of(outcome.at_ns, now)
        details: dict[str, int | str] = {
            "round": outcome.round,
            "m": tokens,
            "depth": depth,
            "accepted": outcome.accepted,
            "chain": origin,
        }
        self.add("verifier", "verify", ended - outcome.verify_ms / 1e3, ended, details)

    def add_draft(self, tree: DraftTree, now: float) -> None:
        """Add one depth of drafting."""
        ended = _end_of(tree.at_ns, now)
        details = {"round": tree.round, "depth": tree.depth, "branches": len(tree.tokens)}
        self.add("drafter", f"depth {tree.depth}", ended - tree.draft_ms / 1e3, ended, details)

    def add(
        self,
        track: Track,
        name: str,
        started: float,
        ended: float,
        details: dict[str, int] | dict[str, int | str] | None = None,
    ) -> None:
        """Add an event of a process from `started` to `ended`."""
        self.events.append(
            TraceEvent(
                track=track,
                name=name,
                start_us=1e6 * started,
                duration_us=max(0.0, 1e6 * (ended - started)),
                details={**(details or {})},
            )
        )


def _end_of(at_ns: int, now: float) -> float:
    at = at_ns / 1e9
    return at if abs(at - now) < _SAME_CLOCK_S else now
