"""A column of the benchmark: a mode, optionally with fixed settings.

Written `mode[:knob]...`, as in `ssd`, `ssd:k=4:b=16`, `ssd:tree-nodes=8`, `sd:k=3`,
`ssd:rejection:saguaro=0.4`, `mlx-lm-draft:k=5`, `ssd:drafter=NAME`.
"""

from collections.abc import Callable
from typing import Any, get_args

import msgspec

from protocol.decoding.sampling_params import check_sampling
from protocol.errors import UsageError
from protocol.messages import Acceptance, Generate, Mode, Sampling

REFERENCES = {"mlx-lm": 0, "mlx-lm-draft": 3}
"""mlx-lm's own generation, and its number of draft tokens (3 is its default)."""

NAMES = (*get_args(Mode), *REFERENCES)

_ACCEPTANCES: tuple[Acceptance, ...] = get_args(Acceptance)


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One way to decode."""

    label: str
    """The text that was parsed."""
    mode: str
    """One of NAMES."""
    num_draft_tokens: int = 0
    """K; 0 is adaptive."""
    branches: int = 0
    """B; 0 is adaptive."""
    tree_nodes: int = 0
    """Draft tokens of verified trees; 0 and 1 are chains."""
    acceptance: Acceptance | None = None
    """None: the command line's rule."""
    saguaro: float | None = None
    drafter: str = ""
    """Draft model with a separate stack; empty: the one of the command line."""

    @property
    def is_reference(self) -> bool:
        """True if mlx-lm itself decodes."""
        return self.mode in REFERENCES

    @property
    def has_draft_model(self) -> bool:
        """True if mlx-lm drafts by itself, which requires a draft model that it can load."""
        return self.is_reference and self.num_draft_tokens > 0

    def sampling(self, base: Sampling) -> Sampling:
        """Return the sampling with this variant's acceptance rule; raise UsageError on a
        conflict.
        """
        mine: dict[str, Any] = {"acceptance": self.acceptance, "saguaro": self.saguaro}
        changes = {name: value for name, value in mine.items() if value is not None}
        changed = msgspec.structs.replace(base, **changes)
        check_sampling(changed)
        return changed

    def request(self, template: Generate) -> Generate:
        """Return the request of the template in this variant."""
        return msgspec.structs.replace(
            template,
            sampling=self.sampling(template.sampling),
            mode=msgspec.convert(self.mode, Mode),
            num_draft_tokens=self.num_draft_tokens,
            branches=self.branches,
            tree_nodes=self.tree_nodes,
        )


_KNOBS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "k": ("num_draft_tokens", int),
    "b": ("branches", int),
    "tree-nodes": ("tree_nodes", int),
    "saguaro": ("saguaro", float),
    "drafter": ("drafter", str),
}


def parse(text: str) -> Variant:
    """Parse one variant; raise UsageError naming the part that is not understood."""
    mode, *knobs = text.strip().split(":")
    if mode not in NAMES:
        raise UsageError(f"unknown mode {mode!r}; known: {', '.join(NAMES)}")
    values: dict[str, Any] = {}
    for knob in knobs:
        values |= _knob(knob, text)
    if mode in REFERENCES:
        if mode == "mlx-lm" or set(values) - {"num_draft_tokens"}:
            _refuse_knobs(text, values)
        values.setdefault("num_draft_tokens", REFERENCES[mode])
    elif mode != "ssd" and set(values) & {"branches", "saguaro"}:
        raise UsageError(f"{text!r}: only ssd prepares branches")
    elif mode == "ar":
        _refuse_knobs(text, values)
    return Variant(label=text.strip(), mode=mode, **values)


def _refuse_knobs(text: str, values: dict[str, Any]) -> None:
    if values:
        raise UsageError(f"{text!r}: this mode does not take that knob")


def _knob(knob: str, text: str) -> dict[str, Any]:
    if knob in _ACCEPTANCES:
        return {"acceptance": knob}
    name, _, value = knob.partition("=")
    if name in _KNOBS and value:
        field, convert = _KNOBS[name]
        try:
            return {field: convert(value)}
        except ValueError as error:
            raise UsageError(f"{text!r}: {knob!r} needs a number") from error
    knob_forms = ["k=N", "b=N", "tree-nodes=N", "saguaro=C", "drafter=MODEL"]
    knob_forms += [*_ACCEPTANCES]
    raise UsageError(f"{text!r}: unknown knob {knob!r}; known: {', '.join(knob_forms)}")


def parse_all(text: str) -> tuple[Variant, ...]:
    """Parse variants separated by commas, and remove duplicates."""
    variants = tuple(parse(part) for part in text.split(","))
    labels = [variant.label for variant in variants]
    if len(set(labels)) < len(labels):
        raise UsageError(f"{text!r} names a mode twice")
    return variants


def require_draft_model(variants: tuple[Variant, ...], backend: str) -> None:
    """Raise UsageError if mlx-lm cannot load the draft model: it would decode plainly."""
    for variant in variants:
        if variant.has_draft_model and backend != "mlx":
            raise UsageError(
                f"{variant.label!r} drafts with an MLX model, and the drafter here is {backend!r}: "
                "leave the mode out, or name an MLX --draft-model"
            )


def default_modes(backend: str) -> str:
    """Return all modes that a drafter of this backend can be compared in."""
    return ",".join(name for name in NAMES if backend == "mlx" or not REFERENCES.get(name))
