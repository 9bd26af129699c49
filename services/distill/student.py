"""The drafter in training: an mlx-lm model of the target's family, with a few of its layers.

It starts as a copy of those layers. Embedding and head are the target's own and stay frozen. A
narrower MLP keeps the hidden columns of largest norm; the residual width cannot change, because the
embedding is shared.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from protocol.decoding.sampler import Ids
from protocol.errors import ModelError, UsageError
from services.distill.logits import Weights, logits_at
from services.mlx.lm_head import keep_rows
from services.mlx.loader import load

_LAYER = "model.layers."
_FROZEN = ("embed", "lm_head")
_NOT_BY_LAYER = ("architectures", "eos_token_id")
_INTO_MLP = ("gate_proj.weight", "up_proj.weight", "gate_proj.bias", "up_proj.bias")
_OUT_OF_MLP = "down_proj.weight"
_ADDED = ("mlp.down_proj", "self_attn.o_proj")
"""The projections that add to the residual stream."""


def chosen_layers(total: int, count: int, given: list[int]) -> list[int]:
    """Return the layers of the target to copy: half from the start, half from the end.

    Raises:
        UsageError: the target has fewer, or a given one does not exist.
    """
    if given:
        if max(given) >= total or len(set(given)) < len(given):
            raise UsageError(f"init_layers must name different layers from 0 to {total - 1}")
        return given
    if count > total:
        raise UsageError(f"the target has {total} layers; the drafter cannot have {count}")
    first = (count + 1) // 2
    return [*range(first), *range(total - (count - first), total)]


def read_config(folder: Path) -> dict[str, Any]:
    """Read the target's `config.json`; raises ModelError if it has no number of layers."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config.get("num_hidden_layers"), int):
        raise ModelError(f"config.json in {str(folder)!r} has no num_hidden_layers")
    return config


def drafter_config(target: dict[str, Any], chosen: list[int], mlp: int) -> dict[str, Any]:
    """Return the target's configuration with fewer layers; raises UsageError for a bad `mlp`."""
    config = {k: v for k, v in target.items() if k not in ("quantization", "quantization_config")}
    total = config["num_hidden_layers"]
    config["num_hidden_layers"] = len(chosen)
    for key, value in config.items():
        # Everything that is listed per layer: kinds, window sizes, head counts.
        if isinstance(value, list) and len(value) == total and key not in _NOT_BY_LAYER:
            config[key] = [value[layer] for layer in chosen]
    if "mlp_only_layers" in config:
        dense = config["mlp_only_layers"]
        config["mlp_only_layers"] = [new for new, old in enumerate(chosen) if old in dense]
    if mlp:
        width = config.get("intermediate_size")
        if not isinstance(width, int) or not mlp <= width:
            raise UsageError(f"mlp must be between 1 and the target's {width} columns")
        config["intermediate_size"] = mlp
    return config


class Student:
    """The drafter in training."""

    def __init__(self, module: Any, head_ids: Ids | None, dtype: mx.Dtype) -> None:
        self.module = module
        self.head_ids = head_ids
        """Token ids of the logits' columns; None if untrimmed."""
        self._dtype = dtype
        if head_ids is not None:
            keep_rows(module, head_ids)
        flat: Any = tree_flatten(module.parameters())
        self.weights: Weights = {
            name: array.astype(mx.float32)
            for name, array in flat
            if not any(part in name for part in _FROZEN)
        }
        """The trainable parameters, in full precision."""
        mx.eval(self.weights, module.parameters())

    def logits(self, weights: Weights, tokens: mx.array, positions: mx.array) -> mx.array:
        """Return [count, head] float32 with these weights, computed in the student's precision."""
        cast = {name: array.astype(self._dtype) for name, array in weights.items()}
        self.module.update(tree_unflatten(list(cast.items())))
        return logits_at(self.module, tokens, positions)


def new_student(
    target: Any,
    config: dict[str, Any],
    chosen: list[int],
    head_ids: Ids | None,
    dtype: mx.Dtype,
) -> Student:
    """Create a drafter from layers of `target`, a dense mlx-lm model.

    Raises:
        ModelError: the family does not allow these layers.
    """
    try:
        arguments: Any = type(target.args).from_dict(config)
        module: Any = type(target)(arguments)
    # The families check their configuration in their own ways.
    except Exception as error:
        raise ModelError(
            f"layers {chosen} of the target do not make a model of their own "
            f"({type(error).__name__}: {error}); choose others with init_layers"
        ) from error
    inherited = _inherit(target, chosen, config.get("intermediate_size"))
    if hasattr(module, "sanitize"):
        # Some families drop their head here when the weights have none. The result is meant for
        # weights from a file; ours have been through it.
        module.sanitize(dict(inherited))
    parameters: Any = dict(tree_flatten(module.parameters()))
    _check_shapes(parameters, inherited)
    module.update(tree_unflatten([(name, inherited[name].astype(dtype)) for name in parameters]))
    return Student(module, head_ids, dtype)


def start_from(student: Student, folder: Path) -> None:
    """Give the student the weights of the drafter in `folder`, as far as it has them.

    A drafter of fewer layers is spread over the first and the last ones. The layers between them
    stay the target's and initially add nothing, so the student starts as the drafter.

    Raises:
        ModelError: a weight is missing there or has another shape, it has more layers,
            or the additions of the layers between them have other names.
    """
    module = load(folder).module
    flat: Any = tree_flatten(module.parameters())
    given: Weights = dict(flat)
    count, layers = len(module.layers), len(student.module.layers)
    if count > layers:
        raise ModelError(f"the drafter {str(folder)!r} has {count} layers; give --layers {count}")
    new = _spread(given, count, layers)
    _silence(student.weights, new)
    for name, array in student.weights.items():
        if name.startswith(new):
            continue
        if name not in given or given[name].shape != array.shape:
            raise ModelError(f"the drafter {str(folder)!r} has another shape at {name}")
        student.weights[name] = given[name].astype(mx.float32)


def _spread(given: Weights, count: int, wanted: int) -> tuple[str, ...]:
    """Rename the last half of `count` layers to be the last of `wanted`.

    Returns the prefixes of those between them.
    """
    first, moved = (count + 1) // 2, wanted - count
    for layer in reversed(range(first, count)) if moved else ():
        prefix = f"{_LAYER}{layer}."
        for name in [name for name in given if name.startswith(prefix)]:
            given[f"{_LAYER}{layer + moved}.{name.removeprefix(prefix)}"] = given.pop(name)
    return tuple(f"{_LAYER}{first + number}." for number in range(moved))


def _silence(weights: Weights, layers: tuple[str, ...]) -> None:
    """Make these layers add nothing to the residual stream."""
    for layer in layers:
        for part in _ADDED:
            if f"{layer}{part}.weight" not in weights:
                raise ModelError(
                    f"a drafter of this family cannot grow: {layer}{part} is not in it; "
                    "give --layers as many as the drafter has"
                )
            for name in (f"{layer}{part}.weight", f"{layer}{part}.bias"):
                if name in weights:
                    weights[name] = mx.zeros_like(weights[name])


def _check_shapes(wanted: Weights, inherited: Weights) -> None:
    for name, array in wanted.items():
        if name not in inherited or inherited[name].shape != array.shape:
            raise ModelError(
                f"the target's layers do not fit the drafter at {name!r}; "
                "choose layers of one kind with init_layers, and no mlp"
            )


def _inherit(target: Any, chosen: list[int], width: Any) -> Weights:
    """Return the target's parameters under the drafter's names."""
    flat: Any = tree_flatten(target.parameters())
    new_number = {str(old): new for new, old in enumerate(chosen)}
    inherited: Weights = {}
    for name, array in flat:
        if not name.startswith(_LAYER):
            inherited[name] = array
            continue
        old, _, rest = name.removeprefix(_LAYER).partition(".")
        if old in new_number:
            inherited[f"{_LAYER}{new_number[old]}.{rest}"] = array
    if isinstance(width, int):
        for layer in range(len(chosen)):
            _narrow(inherited, f"{_LAYER}{layer}.mlp.", width)
    return inherited


def _narrow(weights: Weights, prefix: str, width: int) -> None:
    """Keep the `width` hidden columns of an MLP whose weights have the largest norms."""
    out = weights.get(prefix + _OUT_OF_MLP)
    if out is None or out.ndim != 2 or out.shape[1] <= width:
        return
    into = [weights[prefix + leaf] for leaf in _INTO_MLP[:2] if prefix + leaf in weights]
    norm = mx.linalg.norm(out.astype(mx.float32), axis=0)
    for matrix in into:
        norm = norm * mx.linalg.norm(matrix.astype(mx.float32), axis=1)
    kept = mx.array(np.sort(np.argsort(-np.array(norm), kind="stable")[:width]))
    weights[prefix + _OUT_OF_MLP] = out[:, kept]
    for leaf in _INTO_MLP:
        if prefix + leaf in weights:
            weights[prefix + leaf] = weights[prefix + leaf][kept]


def frequent_ids(tokens: Ids, vocabulary: int, size: int, always: list[int]) -> Ids:
    """Return the ids of a trimmed head: `always`, then tokens from the most frequent on.

    Tokens that never occurred follow in the order of their ids, which for a learned vocabulary is
    nearly that of their frequency.
    """
    counts = np.bincount(tokens, minlength=vocabulary)[:vocabulary].astype(np.int64)
    counts[always] = len(tokens) + 1
    order = np.lexsort((np.arange(vocabulary), -counts))
    ids: Ids = order[: min(size, vocabulary)].astype(np.int64)
    return ids
