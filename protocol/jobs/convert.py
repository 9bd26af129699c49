"""Settings of a conversion to CoreML, and its events: one JSON object a line on stdout."""

from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from protocol.process.files import remove_temporaries
from protocol.settings import ChildSettings, ComputeUnits

Compression = Literal["none", "int8", "palette8", "palette6", "palette4"]
StateWrite = Literal["slice", "onehot"]
Route = Literal["tree", "decode", "prefill"]
"""Functions that process a compared text. tree: the prompt in chunks, the answer in calls of
several tokens. prefill: the prompt in chunks, the answer one by one. decode: all one by one.
"""
ROUTES: tuple[Route, ...] = get_args(Route)


class ConvertSettings(ChildSettings, frozen=True, kw_only=True):
    """One conversion of a model to CoreML (`services/coreml`)."""

    model: str
    """Folder of the model."""
    out: str
    """Folder of the converted model; appears when it is complete."""
    target: str = ""
    """Folder of the target that the model will draft for; empty evaluates the model alone."""
    prompts: str = ""
    """File of tokenised prompts (`protocol.jobs.distill.TokenPrompt`, one JSON a line)."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    context: Annotated[int, msgspec.Meta(ge=64, multiple_of=32)] = 512
    """Slots of the state: committed tokens and drafts."""
    branches: Annotated[int, msgspec.Meta(ge=2)] = 16
    """Parallel branches of tree decoding; also the longest chain."""
    chunk: Annotated[int, msgspec.Meta(ge=2)] = 64
    """Tokens per call of a prefill."""
    width: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Number of best tokens returned per output of the head."""
    layers_per_part: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Split a large model into packages of this many layers; 0 makes one package."""
    compression: Compression = "none"
    state_write: StateWrite = "slice"
    compute_units: ComputeUnits = "auto"
    """Compute units of the comparison that ends the conversion."""
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 32
    """Tokens per prompt that are compared; 0 skips the comparison."""
    all_routes: bool = False
    """Compare along every route, not only along `tree`."""
    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    """Least agreement of package and model, as a share of tokens without ties."""

    def on_orphaned(self) -> None:
        """Remove half-written files."""
        remove_temporaries(Path(self.out))


class TokenDifference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A compared position at which package and model have different best tokens."""

    position: int
    """Position in the concatenated answers."""
    margin: float
    """Distance between the model's two best logits."""
    model: int
    """The model's best token."""
    package: int


class Agreement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Comparison of a package with the model that it came from, on the same texts."""

    tokens: int
    """Positions compared."""
    ties: int
    """Number of positions where the model's two best tokens are closer than `TIE` logits."""
    greedy: float
    """Share of the other positions at which both have the same best token."""
    greedy_with_ties: float
    top8: float
    """Mean share of the model's 8 best tokens among the package's 8 best."""
    kl: float
    """Mean KL divergence of the package's distribution from the model's, in nats."""
    worst_margin: float
    """Largest margin, in the model's logits, at which the two disagree."""
    differences: list[TokenDifference] = []
    """Every position of a disagreement, ties included."""


TIE = 0.05


class DraftAcceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Acceptance rate of a target's own texts as drafts."""

    greedy: float
    """Share of positions at which the draft's best token is the target's."""
    sampled: float
    """At temperature 1 under the rejection rule: the mean of sum(min(p, q)), over the draft's
    reported tokens, so a lower bound."""


class FunctionCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured cost of one function of a package."""

    name: str
    call_ms: float
    """Median of a few calls."""
    tokens: int = 0
    """Tokens computed per call; 0 if unknown."""
    load_ms: float = 0.0
    unit: str = ""
    """Where it runs: "reference", or the device in CoreML's compute plan."""
    devices: dict[str, int] = {}
    """Operations by device, if there is a compute plan."""
    off_ane: dict[str, int] = {}


class ConvertProgress(msgspec.Struct, frozen=True, tag="step"):
    """Current step of a conversion, and the share that is done."""

    what: str
    done: float


class ConvertResult(msgspec.Struct, frozen=True, kw_only=True, tag="converted"):
    """The final event."""

    out: str
    seconds: float
    """Duration of the conversion, without the comparison."""
    megabytes: float
    passed: bool
    """False: the figures are below the threshold, and `out` was not written."""
    agreement: Agreement | None = None
    draft: DraftAcceptance | None = None
    """Acceptance of the package's drafts."""
    model: DraftAcceptance | None = None
    """Acceptance of the drafts of the model that it came from."""
    routes: dict[Route, Agreement] = {}
    """Agreement along each route, with `all_routes`; `agreement` is that of `tree`."""
    costs: list[FunctionCost] = []
    compute_unit: str = ""


ConvertEvent = ConvertProgress | ConvertResult
