"""What is simulated: a device, a pair of models, and how to decode. Values only."""

from typing import Annotated

import msgspec

from protocol.messages import MAX_NODES, MAX_PREPARED, Mode

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, msgspec.Meta(ge=0.0)]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long things take there. Times in milliseconds, curves as `curve.curve` reads them."""

    t_verify: float | str
    """T_v(m): one forward of the target over m tokens."""
    t_draft: float | str
    """T_d(B): one forward of the drafter over B branches."""
    ipc: Amount = 0.15
    """One message from process to process."""
    contention: Amount = 0.0
    """How much slower a verification runs while the drafter works: .1 is a tenth. On one
    device that both share it is 1: each gets half."""
    exchanges: Annotated[int, msgspec.Meta(ge=0)] = 0
    """A target spread over ranks: exchanges of arrays in a pass; two per layer if it is
    tensor-parallel, one per rank if it is pipelined."""
    exchange_bytes: Amount = 8192.0
    """What each of them carries per token: hidden size times the bytes of an activation."""
    link_ms: Amount = 0.0
    """What each of them takes whatever it carries."""
    link_mbytes_per_s: Amount = 0.0
    """The link's bandwidth; 0 is any."""
    jitter: Share = 0.02
    """Spread of every time, as a share of it."""
    branches: Annotated[int, msgspec.Meta(ge=1, le=MAX_PREPARED)] = 8
    """Branches prepared per round where the strategy does not say; a drafter on a GPU has 32."""
    whole_tree: bool = False
    """No anytime preparation: every outcome waits until its tree is complete, as in the paper."""

    def exchange_ms(self, tokens: int) -> float:
        """What exchanges between ranks add to a pass over so many tokens."""
        bandwidth = 1e3 * self.link_mbytes_per_s
        carried_ms = tokens * self.exchange_bytes / bandwidth if bandwidth else 0.0
        return self.exchanges * (self.link_ms + carried_ms)


class AcceptanceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How well the drafter guesses (`script.Script`)."""

    alpha: Rate
    """Rate at which draft tokens are accepted, over the whole text."""
    r: Annotated[float, msgspec.Meta(gt=0.0)] = 0.385
    """Exponent of the misses: after a rejection the bonus token is not among the best F
    candidates with probability (1 - first) F^-r. The default is our own pair's."""
    first: Share = 0.27
    """Rate at which the best candidate after a rejection (the drafted token excluded) is it."""
    r_all: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    """The same where all was accepted; None follows from alpha and the two above."""
    first_all: Share | None = None
    """The same where all was accepted; given together with `r_all`."""
    burst: Share = 0.0
    """0: all tokens are alike. Above: easy and hard stretches; at 1 all or nothing is accepted."""
    stretch: Annotated[float, msgspec.Meta(ge=1.0)] = 12.0
    """Mean tokens of a stretch."""
    insight: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.3
    """What the drafter knows of its own success: the share of the variance of acceptance that
    its confidence explains. 0: it is always equally sure."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device, a pair, and an answer."""

    name: str = "unnamed"
    note: str = ""
    """Where the figures come from."""
    device: Device
    acceptance: AcceptanceModel
    tokens: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] = 2000
    """Length of the answer."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to decode; the fields are those of `messages.Generate`."""

    mode: Mode = "ssd"
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """K; 0 is adaptive."""
    branches: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """B; 0 is adaptive."""
    tree_nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)] = 0
    """Draft tokens of the trees that are verified; 0 and 1: chains."""
    verify_ahead: bool | None = None
    """Whether the verifier begins prepared rounds by itself; None: if that pays."""

    @property
    def label(self) -> str:
        """In a few words."""
        if self.mode == "ar":
            return "ar (plain)"
        knobs = [f"K={self.num_draft_tokens}"] if self.num_draft_tokens else ["adaptive"]
        if self.mode == "ssd":
            knobs += [f"B={self.branches}"] if self.branches else []
        if self.tree_nodes > 1:
            knobs += [f"N={self.tree_nodes}"]
        if self.verify_ahead is not None:
            knobs += ["ahead" if self.verify_ahead else "asked"]
        return f"{self.mode} {' '.join(knobs)}"
