"""What a conversion to CoreML says while it runs, one JSON object a line on stdout."""

import msgspec


class Agreement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A package beside the model that it came from, after the same texts."""

    tokens: int
    """Positions compared."""
    ties: int
    """Of these, positions where the model's two best tokens are closer than `TIE` logits."""
    greedy: float
    """Share of the other positions at which both have the same best token."""
    greedy_with_ties: float
    top8: float
    """Mean share of the model's 8 best tokens among the package's 8 best."""
    kl: float
    """Mean divergence of the package's law from the model's, in nats."""
    worst_margin: float
    """Largest margin, in the model's logits, at which the two disagree."""


TIE = 0.05


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often a target would accept a draft token; texts are the target's own."""

    greedy: float
    """Share of positions at which the draft's best token is the target's."""
    sampled: float
    """At temperature 1 under the rejection rule: the mean of sum(min(p, q)), over the draft's
    reported tokens, so a lower bound."""


class FunctionCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One function of a package, as it was measured."""

    name: str
    call_ms: float
    """Median of a few calls."""
    load_ms: float = 0.0
    unit: str = ""
    """Where it runs: "reference", or what CoreML's compute plan says."""
    devices: dict[str, int] = {}
    """Operations by device, if there is a compute plan."""
    off_ane: dict[str, int] = {}


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What is being done, and the share of it that is done."""

    what: str
    done: float


class Converted(msgspec.Struct, frozen=True, kw_only=True, tag="converted"):
    """The last word."""

    out: str
    seconds: float
    """Of the conversion, without the comparison."""
    megabytes: float
    passed: bool
    """False: the figures are below the threshold, and `out` was not written."""
    agreement: Agreement | None = None
    draft: Acceptance | None = None
    """Of the package."""
    model: Acceptance | None = None
    """Of the model that it came from."""
    costs: list[FunctionCost] = []
    compute_unit: str = ""


Event = Step | Converted
