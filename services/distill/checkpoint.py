"""The state of a training run in one file, replaced atomically: a crash leaves the old one.

The step determines all randomness of a run: batches and positions are functions of
(seed, step).
"""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec

from protocol.errors import RuntimeFailure, UsageError
from protocol.process.files import atomic_writer, remove_leftovers
from services.distill.logits import Weights

_NAME = "checkpoint.safetensors"


class Moments(NamedTuple):
    """AdamW's running means of the gradient and of its square."""

    first: Weights
    second: Weights


class LogEntry(msgspec.Struct, frozen=True):
    """One line of the training log."""

    step: int
    seconds: float
    loss: float
    """Mean since the last entry; its meaning changes with the objective."""
    objective: str
    acceptance: float
    """Validation: mean lower bound of coupled acceptance at temperature 1."""


class Position(msgspec.Struct, frozen=True):
    """Progress of a run."""

    step: int = 0
    seconds: float = 0.0
    """Training time spent, over all calls."""
    log: list[LogEntry] = []


class TrainingCheckpoint(NamedTuple):
    """Everything needed to resume training."""

    weights: Weights
    moments: Moments
    position: Position


def save(folder: Path, checkpoint: TrainingCheckpoint) -> None:
    """Write the checkpoint; raises RuntimeFailure if writing fails."""
    arrays = {
        **{f"weights/{name}": array for name, array in checkpoint.weights.items()},
        **{f"first/{name}": array for name, array in checkpoint.moments.first.items()},
        **{f"second/{name}": array for name, array in checkpoint.moments.second.items()},
    }
    position = msgspec.json.encode(checkpoint.position).decode()
    try:
        remove_leftovers(folder)
        with atomic_writer(folder / _NAME, sync=True) as file:
            mx.save_safetensors(file, arrays, {"position": position})
    except (OSError, RuntimeError) as error:
        raise RuntimeFailure(f"cannot write a checkpoint to {str(folder)!r}: {error}") from error


def load(folder: Path) -> TrainingCheckpoint | None:
    """Return the last checkpoint, if there is one; raises UsageError if it is not readable."""
    path = folder / _NAME
    if not path.is_file():
        return None
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays, metadata = loaded
        mx.eval(arrays)
        position = msgspec.json.decode(metadata["position"], type=Position)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise UsageError(f"{str(path)!r} is not a checkpoint: {error}") from error
    parts: dict[str, Weights] = {"weights": {}, "first": {}, "second": {}}
    for key, array in arrays.items():
        part, _, name = key.partition("/")
        parts[part][name] = array
    return TrainingCheckpoint(parts["weights"], Moments(parts["first"], parts["second"]), position)
