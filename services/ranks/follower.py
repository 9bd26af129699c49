"""A follower: loads its part of the model and repeats rank 0's passes until rank 0 ends."""

import os
import queue
import sys
import threading
from pathlib import Path

from protocol.errors import DeadlineExceeded, ProtocolError, RuntimeFailure, StreamEnded
from protocol.messages import Message
from protocol.process.awake_clock import awake_time
from protocol.process.child import ERROR_PREFIX, pin_to_cores
from protocol.process.logs import configure_logging
from protocol.transport.codec import Decoder
from protocol.transport.pipes import PipeChannel, Pipes
from services.kernels.cpu.library import load_blas
from services.mlx.lean_imports import leave_out_unused_libraries
from services.ranks.build import build_of
from services.ranks.environment import Variables, export_variables
from services.ranks.messages import (
    Beat,
    Begin,
    End,
    Join,
    Joined,
    Loaded,
    Pass,
    Prove,
    ToFollower,
)
from services.ranks.watch import BEAT_S

_JOIN_S = 60.0
_BEGIN_S = 600.0


class LeaderChannel:
    """The channel to rank 0.

    From `watch` on, a thread reads it and sends beats, also during a collective.

    Without rank 0 this process has no purpose, so it ends with rank 0, even if it hangs.
    """

    def __init__(self, pipes: Pipes) -> None:
        self._pipe: PipeChannel[ToFollower] = PipeChannel(*pipes, Decoder(ToFollower))
        self._sending = threading.Lock()
        self._inbox: queue.Queue[ToFollower] = queue.Queue()

    def send(self, message: Message) -> None:
        """Queue a message; errors as for `PipeChannel.send`."""
        with self._sending:
            self._pipe.send(message)

    def first(self) -> Join:
        """Return the first message; errors as for `PipeChannel.receive`."""
        message = self._pipe.receive(_JOIN_S, "first message of rank 0")
        if not isinstance(message, Join):
            raise ProtocolError(f"rank 0 sent {type(message).__name__} before Join")
        return message

    def watch(self, silence_s: float) -> None:
        """Read in a thread from now on, and end this process when rank 0 has ended."""
        threading.Thread(target=self._read, args=(silence_s,), name="rank 0", daemon=True).start()

    def receive(self, timeout_s: float | None = None) -> ToFollower:
        """Return the next message other than a beat; None waits as long as rank 0 lives."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"rank 0 did not go on within {timeout_s} s") from None

    def _read(self, silence_s: float) -> None:
        heard, beaten = awake_time(), 0.0
        beats = False  # rank 0 starts sending beats once all ranks have loaded
        try:
            while True:
                if self._pipe.ready(BEAT_S / 2):
                    message = self._pipe.receive(0.0, "message")
                    heard = awake_time()
                    if isinstance(message, Beat):
                        beats = True
                    else:
                        self._inbox.put(message)
                now = awake_time()
                if now - beaten >= BEAT_S:
                    beaten = now
                    self.send(Beat())
                if beats and now - heard > silence_s:
                    _leave(f"rank 0 has been silent for {silence_s:g} s")
        except StreamEnded:
            os._exit(0)
        except RuntimeFailure as error:
            _leave(str(error))


def _leave(reason: str) -> None:
    sys.stderr.write(f"{ERROR_PREFIX}{reason}\n")
    sys.stderr.flush()
    os._exit(RuntimeFailure.exit_code)


def follow(leader: LeaderChannel) -> None:
    """Repeat rank 0's passes until it sends End.

    Raises:
        SsdError: this rank cannot take part, or a pass failed here.
    """
    join = leader.first()
    configure_logging(f"rank {join.rank}", join.log_level)
    pin_to_cores(join.cores)
    load_blas(join.threads or os.cpu_count() or 1)
    leave_out_unused_libraries()
    leader.send(Joined(pid=os.getpid(), build=build_of(join.model)))
    leader.watch(join.silence_timeout_s)
    if isinstance(leader.receive(_BEGIN_S), Begin):
        _serve(join, leader)


def _serve(join: Join, leader: LeaderChannel) -> None:
    variables = Variables(join.environment, join.files)
    # MLX enumerates GPUs on import, which must come after the BLAS.
    with export_variables(variables):
        from services.ranks.sharding import join_group  # noqa: PLC0415

    group = join_group(join.backend, variables, join.device, join.meet_timeout_s)
    if join.loads:
        from services.mlx.taps import assist  # noqa: PLC0415
        from services.ranks.mirror import StoreTwins  # noqa: PLC0415
        from services.ranks.sharding import load_part  # noqa: PLC0415

        part = load_part(Path(join.model), group, join.split, join.kv_bytes, join.local_ranks)
        leader.send(Loaded(facts=part.facts))
        twins = StoreTwins(part.windows, bucketed=part.target.bucketed)
        while True:
            message = leader.receive()
            match message:
                case Pass():
                    twins.repeat(part.loaded.module, message)
                case Prove(layers=layers):
                    assist(part.loaded.module, layers, part.target.run_alone)
                case End():
                    return
                case other:
                    raise ProtocolError(f"rank 0 sent {type(other).__name__} among passes")
    else:
        from services.ranks.sharding import bare_facts  # noqa: PLC0415

        leader.send(Loaded(facts=bare_facts(group, join.local_ranks)))
        leader.receive()
