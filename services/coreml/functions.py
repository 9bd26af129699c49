"""The functions of a package, and their shapes.

All are static: CoreML compiles one program per function, and flexible shapes do not run on the
Neural Engine.
"""

from typing import Annotated

import msgspec

HEAD_ROWS = 16384
"""Most rows of one product of the head; older Neural Engines take no larger dimension."""

MASKED = -1e4
"""Added to the scores of masked slots; infinities become NaN."""


class PackageFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One function of a package."""

    name: str
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Queries of a call; a shorter call is padded."""
    stateful: bool
    """True for keys and values in CoreML states; otherwise the past is an input and the new ones
    outputs.
    """
    head: bool
    """True if it returns the best tokens of every query."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive layers as one package; a large model has several."""

    file: str
    first: int
    stop: int
    """Layers [first, stop)."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.stop - self.first


def functions_of(branches: int, chunk: int) -> list[PackageFunction]:
    """Return a drafter's functions: branches, one token, a prompt; and a stateless prompt."""
    return [
        PackageFunction("tree", branches, stateful=True, head=True),
        PackageFunction("decode", 1, stateful=True, head=True),
        PackageFunction("prefill", chunk, stateful=True, head=False),
        PackageFunction("prefill_kv", chunk, stateful=False, head=False),
    ]


def parts_of(layers: int, per_part: int) -> list[Part]:
    """Return the packages of a model; `per_part` 0 puts all layers in one."""
    step = per_part or layers
    cuts = [(first, min(first + step, layers)) for first in range(0, layers, step)]
    if len(cuts) == 1:
        return [Part("model.mlpackage", 0, layers)]
    return [Part(f"part{i}.mlpackage", first, stop) for i, (first, stop) in enumerate(cuts)]
