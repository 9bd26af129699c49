"""Rank 0's watch over its followers, in a thread: the worker thread may hang in a collective.

A follower is lost when its pipe ends, when it sends Left, or when it is silent for too long. Its
own beats come from a thread too, so silence means that the process or the machine is stopped or
disconnected; a follower that hangs in a driver keeps rank 0 from beating, which the orchestrator
notices.
"""

import queue
import select
import threading
from collections.abc import Callable, Sequence

from protocol.errors import DeadlineExceeded, RuntimeFailure, StreamEnded
from protocol.process.awake_clock import awake_time
from protocol.process.closeable import Closeable
from services.ranks.messages import Beat, Left, Loaded, RankFacts
from services.ranks.process import RankProcess

BEAT_S = 0.5
_TICK_S = 0.2


class FollowerWatch(Closeable):
    """Reads all messages from followers, and sends rank 0's beats.

    Args:
        followers: of this rank 0, all joined.
        silence_s: seconds without a message after which a loaded follower is lost.
        give_up: called once, in the watch thread, with a reason and an exit code.
    """

    def __init__(
        self,
        followers: Sequence[RankProcess],
        silence_s: float,
        give_up: Callable[[str, int], None],
    ) -> None:
        self._followers = {follower.reading: follower for follower in followers}
        self._silence_s = silence_s
        self._give_up = give_up
        self._heard: dict[int, float] = {}
        """Rank -> time of its last message, once it has loaded."""
        self._beating = False
        self._loaded: queue.Queue[tuple[int, RankFacts]] = queue.Queue()
        self._closing = threading.Event()
        self._verdict = threading.Event()
        self._poll = select.poll()
        for descriptor in self._followers:
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def await_loaded(self, timeout_s: float) -> list[RankFacts]:
        """Return the facts of the followers by rank; raises DeadlineExceeded."""
        found: dict[int, RankFacts] = {}
        while len(found) < len(self._followers):
            try:
                rank, facts = self._loaded.get(timeout=timeout_s)
            except queue.Empty:
                raise DeadlineExceeded(f"not all ranks have loaded in {timeout_s:g} s") from None
            found[rank] = facts
        # While MLX forms the group it blocks all our threads, and that is not a silent rank 0.
        self._beating = True
        return [facts for _, facts in sorted(found.items())]

    def wait_for_verdict(self, timeout_s: float) -> None:
        """Give the watch time to find out which rank was lost, and to end this process."""
        self._verdict.wait(timeout_s)

    def _run(self) -> None:
        beaten = 0.0
        while not self._closing.is_set():
            for descriptor, _ in self._poll.poll(1e3 * _TICK_S):
                self._read(self._followers[descriptor])
            now = awake_time()
            if self._beating and now - beaten >= BEAT_S:
                beaten = now
                self._beat()
            self._look_for_silence(now)

    def _read(self, follower: RankProcess) -> None:
        try:
            while follower.ready(0.0):
                message = follower.receive(0.0, "message")
                if follower.rank in self._heard or isinstance(message, Loaded):
                    self._heard[follower.rank] = awake_time()
                match message:
                    case Beat():
                        pass
                    case Loaded(facts=facts):
                        self._loaded.put((follower.rank, facts))
                    case Left(reason=reason, exit_code=code):
                        self._lose(f"{follower.name}: {reason}", code)
                    case other:
                        self._lose(f"{follower.name} sent {type(other).__name__}")
        except StreamEnded:
            if not self._closing.is_set():
                self._lose(follower.last_words())
        except RuntimeFailure as error:
            self._lose(f"{follower.name}: {error}")

    def _beat(self) -> None:
        for follower in self._followers.values():
            try:
                follower.send(Beat())
            except StreamEnded:
                self._read(follower)  # its own pipe has the reason
            except RuntimeFailure as error:
                self._lose(f"{follower.name}: {error}")

    def _look_for_silence(self, now: float) -> None:
        for follower in self._followers.values():
            heard = self._heard.get(follower.rank)
            if heard is not None and now - heard > self._silence_s:
                self._lose(f"{follower.name} has been silent for {self._silence_s:g} s")

    def _lose(self, reason: str, code: int = RuntimeFailure.exit_code) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._give_up(reason, code)
        self._verdict.set()

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _TICK_S + 1.0)
