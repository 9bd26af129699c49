"""Rank 0's side of a group: start the followers, compare builds, announce passes, watch them."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from protocol.errors import (
    BY_EXIT_CODE,
    BackendLost,
    DeadlineExceeded,
    ModelError,
    ProtocolError,
    RuntimeFailure,
    StreamEnded,
)
from protocol.messages import Message, RankStatus
from protocol.process.child import ERROR_PREFIX
from protocol.process.closeable import Closeable
from protocol.process.deadline import Deadline
from protocol.settings import Device, RankGroupSettings, VerifierSettings
from services.ranks.build import build_of, difference
from services.ranks.environment import hold_ports, variables_of
from services.ranks.messages import Begin, Join, Joined, Left, Pass, Prove, RankFacts
from services.ranks.process import RankProcess
from services.ranks.watch import FollowerWatch

_LOAD_S = 3600.0
"""Longest wait for all parts to be loaded; the supervisor's own limit is shorter."""
_EXPLAIN_S = 2.0
_WITNESS = 0.01
"""Relative difference of the probe's logits; ranks may round differently."""

M = TypeVar("M", bound=Message)


class RankGroup(Closeable):
    """The followers of one rank 0. Everything here works before MLX is imported."""

    def __init__(
        self, settings: VerifierSettings, group: RankGroupSettings, *, loads: bool = True
    ) -> None:
        """Start the followers and check that all ranks would compute the same.

        Without `loads` they compare their copies of the model, but load nothing.

        Raises:
            UsageError: the hosts lack what the backend needs.
            ModelError: a rank has other versions or another model.
            RuntimeFailure: a host did not answer in time, or its follower ended.
        """
        self._settings = group
        self._loads = loads
        self.device = _device_of(settings.device)
        """Device of all ranks; their variables decide which GPU each of them sees."""
        self._ports = hold_ports(group)
        self._followers: list[RankProcess] = []
        self._watch: FollowerWatch | None = None
        self._facts: list[RankFacts] = []
        try:
            self.variables = variables_of(group, self._ports)
            self._build = build_of(settings.model)
            for rank, host in enumerate(group.hosts[1:], start=1):
                self._followers.append(RankProcess(rank, host, group.python))
            for follower in self._followers:
                self._guard(follower, partial(follower.send, self._join(settings, follower)))
            deadline = Deadline(group.start_timeout_s)
            for follower in self._followers:
                self._await_joined(follower, deadline)
        except BaseException:
            self.close()
            raise

    def _join(self, settings: VerifierSettings, follower: RankProcess) -> Join:
        variables = self.variables[follower.rank]
        return Join(
            rank=follower.rank,
            ranks=len(self._settings.hosts),
            backend=self._settings.backend,
            environment=variables.plain,
            files=variables.files,
            model=settings.model,
            loads=self._loads,
            split=self._settings.split,
            local_ranks=self._settings.ranks_beside(follower.rank),
            device=self.device,
            cores=follower.host.cores,
            threads=settings.threads if follower.host.is_local else 0,
            kv_bytes=settings.kv_bytes,
            log_level=settings.log_level,
            meet_timeout_s=self._settings.meet_timeout_s,
            silence_timeout_s=self._settings.silence_timeout_s,
        )

    def _await_joined(self, follower: RankProcess, deadline: Deadline) -> None:
        answer = self._guard(
            follower, lambda: follower.receive(deadline.remaining, "first message")
        )
        if not isinstance(answer, Joined):
            raise ProtocolError(
                f"{follower.name} sent {type(answer).__name__} as its first message"
            )
        follower.remote_pid = answer.pid
        if different := difference(self._build, answer.build):
            raise ModelError(f"{follower.name} has {different}; make them the same")

    def _guard(self, follower: RankProcess, step: Callable[[], M | None]) -> M | None:
        """Run a step of the start; its errors name the host."""
        try:
            answer = step()
        except StreamEnded as error:
            raise RuntimeFailure(follower.last_words()) from error
        except DeadlineExceeded as error:
            said = f"; ssh said: {follower.last_line}" if follower.last_line else ""
            raise DeadlineExceeded(
                f"{follower.name} did not answer within {self._settings.start_timeout_s:g} s{said}"
            ) from error
        if isinstance(answer, Left):
            kind = BY_EXIT_CODE.get(answer.exit_code, RuntimeFailure)
            raise kind(f"{follower.name}: {answer.reason}")
        return answer

    def begin(self) -> None:
        """Let the followers form the group and load; do the same here right afterwards."""
        for follower in self._followers:
            self._guard(follower, partial(follower.send, Begin()))
        self._watch = FollowerWatch(
            self._followers, self._settings.silence_timeout_s, self._give_up
        )

    def complete(self, own: RankFacts) -> None:
        """Wait until all parts are loaded.

        Raises:
            ModelError: the ranks compute on different kinds of devices.
            DeadlineExceeded: a rank did not load in time.
        """
        if self._watch is None:
            raise AssertionError("the followers load after `begin`")
        self._facts = [own, *self._watch.await_loaded(_LOAD_S)]
        self._ports.close()
        for rank, facts in enumerate(self._facts):
            if facts.compute_unit != own.compute_unit:
                raise ModelError(
                    f"rank {rank} computes on {facts.compute_unit} and rank 0 on "
                    f"{own.compute_unit}; choose one kind with --target-device"
                )
            if facts.shares_passes != own.shares_passes:
                raise ModelError(f"rank {rank} cannot share passes as rank 0 does")
            if not abs(facts.witness - own.witness) <= _WITNESS * abs(own.witness):
                raise ModelError(
                    f"rank {rank} ends in other logits than rank 0 ({facts.witness:.6g}, here "
                    f"{own.witness:.6g}): it holds other weights, or the exchanges go wrong"
                )

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that fit into the memory of every rank; 0 means unlimited."""
        return min((f.kv_tokens for f in self._facts if f.kv_tokens), default=0)

    @property
    def status(self) -> list[RankStatus]:
        """The status of each rank."""
        pids = [os.getpid(), *(follower.remote_pid for follower in self._followers)]
        rows = zip(self._settings.hosts, pids, self._facts, strict=True)
        return [
            RankStatus(
                rank=rank,
                host=host.name,
                pid=pid,
                weight_bytes=facts.weight_bytes,
                latency_ms=facts.latency_ms,
                mbytes_per_s=facts.mbytes_per_s,
                part=facts.part,
                free_bytes=facts.free_bytes,
                pass_ms=facts.pass_ms,
                read_bytes_s=facts.read_bytes_s,
            )
            for rank, (host, pid, facts) in enumerate(rows)
        ]

    def announce(self, message: Pass | Prove) -> None:
        """Announce the next pass to the followers."""
        for follower in self._followers:
            try:
                follower.send(message)
            except RuntimeFailure as error:
                raise BackendLost(self.explain(error)) from error

    def explain(self, error: Exception) -> str:
        """Explain why the group ended; the watch, which knows the lost rank, may exit first."""
        if self._watch is not None:
            self._watch.wait_for_verdict(_EXPLAIN_S)
        return f"a forward pass failed on all ranks: {error}"

    def _give_up(self, reason: str, exit_code: int) -> None:
        """End this process from the watch thread: the worker thread may hang in a collective."""
        sys.stderr.write(f"{ERROR_PREFIX}{reason}\n")
        sys.stderr.flush()
        _end(self._followers, 0.0)
        os._exit(exit_code)

    def close(self) -> None:
        """End all followers; safe to call twice."""
        self._ports.close()
        if self._watch is not None:
            self._watch.close()
        _end(self._followers)
        self._followers = []


def _end(followers: Sequence[RankProcess], timeout_s: float | None = None) -> None:
    for follower in followers:
        follower.ask_to_end()
    for follower in followers:
        with contextlib.suppress(OSError):
            follower.end(*([] if timeout_s is None else [timeout_s]))


def _device_of(device: Device) -> Device:
    return "gpu" if device.startswith("cuda") else device
