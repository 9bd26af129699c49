"""Fair scheduling: places are shared by client, then by request. Pure.

The sequences of one request (its `n` answers) are decoded one after the other while others wait. A
place goes to the client that holds fewest, and within it to the request that holds fewest; ties go
to the least recently served. A request with more than its share gives a place up at once, and if
there are more requests than places, each holds one in turn. Under heavy load there are more places
than usual, since their number determines how long each request waits.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

_ROUND_S = 0.6
"""Time slice: a request is put aside for this long if every other uses a full slice."""
_MOST_ROUNDS = 4
"""If a request had to wait for more rounds than this, places are added, up to this multiple of the
configured number; slices do not become shorter than for this many rounds.
"""

Client = tuple[bool, str]
"""A client: True if its requests yield to all others, and its name."""


@dataclass(frozen=True)
class Claim:
    """A sequence that wants a place."""

    number: int
    """Number of the sequence: lower ones of a request come first."""
    client: Client
    group: int
    """Group of the client's request."""

    @property
    def request(self) -> tuple[Client, int]:
        """The request that it belongs to, among all clients' requests."""
        return self.client, self.group


@dataclass
class _Hold:
    claim: Claim
    since: float
    has_decoded: bool = False
    """True once it has decoded anything in this place."""


class FairShares:
    """Claims and the places they hold; times in seconds of any one clock."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._held: dict[int, _Hold] = {}
        self._parked: dict[int, Claim] = {}
        """Claims without a place whose prompts are still computed after their time slice."""
        self._lines: dict[Client, dict[int, dict[int, Claim]]] = {}
        """Waiting claims by client, request and number."""
        self._turns: dict[Client | tuple[Client, int], int] = {}
        """Turn in which each client and request was last served."""
        self._numbers = itertools.count()

    @property
    def has_place(self) -> bool:
        """True if a place is free."""
        return len(self._held) < self._count_places()

    @property
    def requests_waiting(self) -> int:
        """Number of requests with a waiting sequence and none in a place."""
        at_work = {claim.request for claim in self._at_work()}
        return sum(
            (client, group) not in at_work
            for client, groups in self._lines.items()
            for group in groups
        )

    def add(self, claim: Claim) -> None:
        """Put a claim in the queue."""
        for key in (claim.client, claim.request):
            self._turns.setdefault(key, next(self._numbers))
        self._lines.setdefault(claim.client, {}).setdefault(claim.group, {})[claim.number] = claim

    def remove(self, claim: Claim) -> None:
        """Remove a claim, wherever it is."""
        self._held.pop(claim.number, None)
        self._parked.pop(claim.number, None)
        self._leave_line(claim)
        others = [*self._at_work(), *self._waiting()]
        if all(other.request != claim.request for other in others):
            self._turns.pop(claim.request, None)
        if all(other.client != claim.client for other in others):
            self._turns.pop(claim.client, None)

    def find_next(self) -> Claim | None:
        """Find the claim that gets the next place; None if none waits."""
        if not self._lines:
            return None
        clients, requests = self._count_held()
        client = min(
            self._lines, key=lambda client: (client[0], clients[client], self._turns[client])
        )
        groups = self._lines[client]
        group = min(groups, key=lambda g: (requests[client, g], self._turns[client, g]))
        return groups[group][min(groups[group])]

    def grant(self, claim: Claim, now: float) -> None:
        """Give the claim a place."""
        self._leave_line(claim)
        self._held[claim.number] = _Hold(claim, now)
        self._move_back(claim)

    def on_tokens(self, number: int, now: float) -> bool:
        """Record that it has decoded; return False if it holds no place and none is free."""
        hold = self._held.get(number)
        if hold is None and (parked := self._parked.get(number)) is not None:
            if not self.has_place:
                return False
            del self._parked[number]
            hold = self._held[number] = _Hold(parked, now)
        if hold is not None:
            hold.has_decoded = True
        return True

    def park(self, claim: Claim) -> bool:
        """Continue its prompt without a place; return False if that is done, or too many do."""
        if self._held[claim.number].has_decoded or len(self._parked) >= self._count_places():
            return False
        del self._held[claim.number]
        self._parked[claim.number] = claim
        return True

    def give_up(self, claim: Claim) -> None:
        """Give up its place and put it behind all others."""
        self._held.pop(claim.number, None)
        self._parked.pop(claim.number, None)
        self.add(claim)
        self._move_back(claim)

    def find_victim(self, now: float) -> Claim | None:
        """Find the claim that has to make room for the next one; None if none has to."""
        waiting = self.find_next()
        if waiting is None:
            return None
        stint_s = self._stint_s
        clients, requests = self._count_held()
        best, best_rank = None, (0.0, 0.0)
        for hold in self._held.values():
            held = hold.claim
            if held.client == waiting.client:
                excess: float = requests[held.request] - requests[waiting.request]
            else:
                excess = clients[held.client] - clients[waiting.client]
                if held.client[0] != waiting.client[0]:
                    excess = inf if held.client[0] else 0
            held_s = now - hold.since
            is_due = excess > 1 or (excess == 1 and held_s >= stint_s)
            # Of one request, the sequences that started last wait first.
            rank = (excess, held_s if excess == 1 else held.number)
            if is_due and rank > best_rank:
                best, best_rank = held, rank
        return best

    @property
    def _stint_s(self) -> float:
        """Time slice for a place if a request waits that holds none."""
        rounds = ceil(max(1, self.requests_waiting) / self._count_places())
        return _ROUND_S / min(_MOST_ROUNDS, rounds)

    def _count_places(self) -> int:
        """Return the number of places: the configured one, or more under heavy load."""
        requests = sum(len(groups) for groups in self._lines.values())
        needed = ceil(requests / _MOST_ROUNDS)
        return min(_MOST_ROUNDS * self._places, max(self._places, needed))

    def _count_held(self) -> tuple[Counter[Client], Counter[tuple[Client, int]]]:
        claims = [hold.claim for hold in self._held.values()]
        return Counter(c.client for c in claims), Counter(c.request for c in claims)

    def _at_work(self) -> Iterator[Claim]:
        yield from (hold.claim for hold in self._held.values())
        yield from self._parked.values()

    def _waiting(self) -> Iterator[Claim]:
        for groups in self._lines.values():
            for line in groups.values():
                yield from line.values()

    def _leave_line(self, claim: Claim) -> None:
        groups = self._lines.get(claim.client, {})
        line = groups.get(claim.group, {})
        line.pop(claim.number, None)
        if not line:
            groups.pop(claim.group, None)
        if not groups:
            self._lines.pop(claim.client, None)

    def _move_back(self, claim: Claim) -> None:
        """Move its client and its request behind their equals."""
        for key in (claim.client, claim.request):
            self._turns[key] = next(self._numbers)
