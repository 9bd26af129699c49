"""Changes to the calls of a model's layers, which can be undone.

mlx-lm has no hooks: a changed layer gets a class derived from its own, and keeps its parameters.
Several changes of one layer lie over each other in a fixed order, whenever they come and go.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

_PATCHES, _PLAIN = "_patches", "_plain_class"


class Unfit(Exception):
    """A layer is of a kind that kernels do not compute."""


@dataclass(frozen=True, eq=False)
class Patch:
    """A change of one layer."""

    layer: Any
    change: Callable[[type], type]
    """Derives the changed class from the layer's: the same one for equal classes."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that the changed class needs."""
    is_reader: bool = False
    """True if it reads what calls are given or return: it lies around changes that compute."""


def install(patches: Iterable[Patch]) -> list[Patch]:
    """Make these changes, and return them."""
    made = list(patches)
    for patch in made:
        vars(patch.layer).update(patch.values)
        _apply(patch.layer, [*patches_of(patch.layer), patch])
    return made


def remove(patches: Iterable[Patch]) -> None:
    """Undo these changes; others stay."""
    for patch in patches:
        for name in patch.values:
            del vars(patch.layer)[name]
        _apply(patch.layer, [other for other in patches_of(patch.layer) if other is not patch])


def remove_all(model: nn.Module, *changes: Callable[[type], type]) -> None:
    """Undo all changes of these kinds in a model."""
    installed = [patch for _, layer in model.named_modules() for patch in patches_of(layer)]
    remove(patch for patch in installed if patch.change in changes)


def patches_of(layer: Any) -> list[Patch]:
    """Return the changes of a layer."""
    patches: list[Patch] = vars(layer).get(_PATCHES, [])
    return patches


def _apply(layer: Any, patches: list[Patch]) -> None:
    plain: type = vars(layer).get(_PLAIN, type(layer))
    layer.__class__ = plain
    for patch in sorted(patches, key=lambda one: one.is_reader):
        layer.__class__ = patch.change(layer.__class__)
    # Not by assignment, which would make parameters of lists.
    vars(layer).update({_PATCHES: patches, _PLAIN: plain})
