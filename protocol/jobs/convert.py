"""Settings of a conversion to CoreML, and its events: one JSON object a line on stdout."""

from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from protocol.process.files import remove_temporaries
from protocol.settings import ChildSettings, ComputeUnits

Compression = Literal["none", "int8", "palette8", "palette6", "palette4"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
StateWrite = Literal["slice", "onehot"]
Route = Literal["tree", "decode", "prefill"]
"""Which functions a compared text goes through. tree: the prompt in chunks, the answer in calls
of several tokens. prefill: the prompt in chunks, the answer one by one. decode: all one by one."""
ROUTES: tuple[Route, ...] = get_args(Route)
STATE_WRITES: tuple[StateWrite, ...] = get_args(StateWrite)


class ConvertSettings(ChildSettings, frozen=True, kw_only=True):
    """One conversion of a model to CoreML (`services/coreml`)."""

    model: str
    """Folder of the model."""
    out: str
    """Folder of the converted model; appears when it is complete."""
    target: str = ""
    """Folder of the target that the model is to draft for; empty judges the model alone."""
    prompts: str = ""
    """File of tokenised prompts (`protocol.jobs.distill.TokenPrompt`, one JSON a line)."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    context: Annotated[int, msgspec.Meta(ge=64, multiple_of=32)] = 512
    """Slots of the state: committed tokens and drafts."""
    branches: Annotated[int, msgspec.Meta(ge=2)] = 16
    """Parallel branches of tree decoding; the longest chain, too."""
    chunk: Annotated[int, msgspec.Meta(ge=2)] = 64
    """Tokens of one call of a prefill."""
    width: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Best tokens that each product of the head returns."""
    layers_per_part: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Cut a large model into packages of so many layers; 0 makes one package."""
    compression: Compression = "none"
    state_write: StateWrite = "slice"
    compute_units: ComputeUnits = "auto"
    """Of the comparison that ends the conversion."""
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 32
    """Tokens per prompt that are compared; 0 skips the comparison."""
    all_routes: bool = False
    """Compare along every route, not along `tree` alone."""
    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    """Least share of tokens on which package and model must agree, ties left out."""

    def on_orphaned(self) -> None:
        """Leave nothing half-written."""
        remove_temporaries(Path(self.out))


class TokenDifference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A compared position at which package and model have other best tokens."""

    position: int
    """In the answers, which follow each other without gaps."""
    margin: float
    """Between the model's two best logits."""
    model: int
    """The model's best token."""
    package: int


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
    """Mean divergence of the package's distribution from the model's, in nats."""
    worst_margin: float
    """Largest margin, in the model's logits, at which the two disagree."""
    differences: list[TokenDifference] = []
    """Every position of a disagreement, ties included."""


TIE = 0.05


class DraftAcceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    tokens: int = 0
    """That a call computes; 0 if that is not known."""
    load_ms: float = 0.0
    unit: str = ""
    """Where it runs: "reference", or what CoreML's compute plan says."""
    devices: dict[str, int] = {}
    """Operations by device, if there is a compute plan."""
    off_ane: dict[str, int] = {}


class ConvertProgress(msgspec.Struct, frozen=True, tag="step"):
    """Present step of a conversion, and the share of it that is done."""

    what: str
    done: float


class ConvertResult(msgspec.Struct, frozen=True, kw_only=True, tag="converted"):
    """The last word."""

    out: str
    seconds: float
    """Of the conversion, without the comparison."""
    megabytes: float
    passed: bool
    """False: the figures are below the threshold, and `out` was not written."""
    agreement: Agreement | None = None
    draft: DraftAcceptance | None = None
    """Of the package."""
    model: DraftAcceptance | None = None
    """Of the model that it came from."""
    routes: dict[Route, Agreement] = {}
    """With `all_routes`: the agreement along each; `agreement` is the one of `tree`."""
    costs: list[FunctionCost] = []
    compute_unit: str = ""


ConvertEvent = ConvertProgress | ConvertResult
