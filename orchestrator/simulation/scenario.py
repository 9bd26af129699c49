"""Simulation input: a device, a pair of models, and a decoding strategy. Values only."""

from typing import Annotated

import msgspec

from orchestrator.learning.cost_model import BRANCHES_ON_A_CPU
from orchestrator.learning.fan_out import AFTER_REJECTION
from protocol.messages import MAX_NODES, MAX_PREPARED, Mode

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, msgspec.Meta(ge=0.0)]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Latencies of a device. Times in milliseconds, curves in the notation of
    `latency_curve.curve`.
    """

    t_verify: float | str
    """T_v(m): one forward of the target over m tokens."""
    t_draft: float | str
    """T_d(B): one forward of the drafter over B branches."""
    draft_start: Amount = 0.0
    """Extra time of a draft's first token, in turn or in parallel."""
    ipc: Amount = 0.15
    """One message between processes."""
    contention: Amount = 0.0
    """Relative slowdown of a verification while the drafter works: .1 is a tenth. On one device
    shared equally it is 1: each gets half.
    """
    shares_cores: bool = False
    """True if both compute on the cores of one CPU: then the contention is measured at load, and
    drafting begins in turn.
    """
    exchanges: Annotated[int, msgspec.Meta(ge=0)] = 0
    """For a target spread over ranks: exchanges of arrays per pass; two per layer if it is
    tensor-parallel, one per rank if it is pipelined.
    """
    exchange_bytes: Amount = 8192.0
    """Bytes per token of one exchange: hidden size times the bytes of an activation."""
    link_ms: Amount = 0.0
    """Fixed latency of one exchange."""
    link_mbytes_per_s: Amount = 0.0
    """Bandwidth of the link; 0 is unlimited."""
    jitter: Share = 0.02
    """Spread of every time, as a fraction of it."""
    branches: Annotated[int, msgspec.Meta(ge=1, le=MAX_PREPARED)] = BRANCHES_ON_A_CPU
    """Branches prepared per round if the strategy does not set them; a drafter on a GPU has 32."""
    whole_tree: bool = False
    """Disables anytime preparation: every outcome waits until its tree is complete, as in the
    paper.
    """

    def exchange_ms(self, tokens: int) -> float:
        """Return the time that exchanges between ranks add to a pass over this many tokens."""
        bandwidth = 1e3 * self.link_mbytes_per_s
        carried_ms = tokens * self.exchange_bytes / bandwidth if bandwidth else 0.0
        return self.exchanges * (self.link_ms + carried_ms)


class AcceptanceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Quality of the drafter's guesses (`oracle.Oracle`)."""

    alpha: Rate
    """Mean acceptance rate of draft tokens over the whole text."""
    r: Annotated[float, msgspec.Meta(gt=0.0)] = AFTER_REJECTION.exponent
    """Exponent of the misses: after a rejection the bonus token is not among the best F candidates
    with probability (1 - first) F^-r. The default was measured with the default pair.
    """
    first: Share = 1.0 - AFTER_REJECTION.scale
    """Probability that the best candidate after a rejection, other than the drafted token, is
    right.
    """
    r_all: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    """`r` where all draft tokens were accepted; None derives it from alpha, `r` and `first`."""
    first_all: Share | None = None
    """`first` where all draft tokens were accepted; set together with `r_all`."""
    burst: Share = 0.0
    """Burstiness. 0: all tokens are alike. Above: easy and hard stretches; at 1 all or none are
    accepted.
    """
    stretch: Annotated[float, msgspec.Meta(ge=1.0)] = 12.0
    """Mean tokens of a stretch."""
    insight: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.3
    """Informativeness of the drafter's confidence: the fraction of the variance of acceptance that
    it explains. 0: the confidence is constant.
    """


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device, a pair, and an answer."""

    name: str = "unnamed"
    note: str = ""
    """Source of the figures."""
    device: Device
    acceptance: AcceptanceModel
    tokens: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] = 2000
    """Length of the answer."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decoding options; the fields are those of `messages.Generate`."""

    mode: Mode = "ssd"
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """K; 0 is adaptive."""
    branches: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """B; 0 is adaptive."""
    tree_nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)] = 0
    """Draft tokens of the trees that are verified; 0 and 1: chains."""

    @property
    def label(self) -> str:
        """A short label."""
        if self.mode == "ar":
            return "ar (plain)"
        knobs = [f"K={self.num_draft_tokens}"] if self.num_draft_tokens else ["adaptive"]
        if self.mode == "ssd":
            knobs += [f"B={self.branches}"] if self.branches else []
        if self.tree_nodes > 1:
            knobs += [f"N={self.tree_nodes}"]
        return f"{self.mode} {' '.join(knobs)}"
