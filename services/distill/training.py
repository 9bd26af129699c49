"""The training loop: AdamW on the loss at the answer's positions, within a budget.

The loop stays one step ahead of the device: it reads the loss of the previous step while the next
one runs.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.optimizers as optimizers

from protocol.errors import RuntimeFailure
from protocol.jobs.distill import DistillProgress, DistillSettings
from services.distill.batches import Batches, TrainingBatch
from services.distill.checkpoint import LogEntry, Moments, Position, TrainingCheckpoint
from services.distill.logits import TargetDistribution, Weights, number
from services.distill.objective import LOSSES, Objective, acceptance_bound
from services.distill.run_control import RunControl
from services.distill.student import Student
from services.mlx.launching import launch

_BETAS = (0.9, 0.95)
"""AdamW's betas."""
_LAST_RATE = 0.02
"""Final learning rate as a share of the highest."""
_LOGS = 40
"""Entries of the training log in a run that is limited by steps."""
_LOG_EVERY_S = 15.0


class DeviceBatch(NamedTuple):
    """A batch on the device."""

    tokens: mx.array
    positions: mx.array
    importance: mx.array


class _Updated(NamedTuple):
    loss: mx.array
    weights: Weights
    moments: Moments


class Budget(NamedTuple):
    """The extent of a training: in steps if given, otherwise in seconds."""

    steps: int
    seconds: float

    def share(self, position: Position) -> float:
        """Return the share of it that is spent."""
        if self.steps:
            return position.step / self.steps
        return position.seconds / max(self.seconds, 1e-9)


def learning_rate(settings: DistillSettings, spent: float) -> float:
    """Return the learning rate: linear warm-up, then half a cosine."""
    rise = min(1.0, (spent + 1e-3) / max(settings.warmup, 1e-3))
    fall = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(spent, 1.0)))
    return settings.learning_rate * rise * fall


class Trainer:
    """One student, one target distribution, one stream of batches."""

    def __init__(
        self,
        settings: DistillSettings,
        student: Student,
        distribution: TargetDistribution,
        *,
        batches: Batches,
        validation: Batches,
    ) -> None:
        self._student = student
        self._distribution = distribution
        self._batches = batches
        self._validation = validation
        self._settings = settings

    def start(self) -> TrainingCheckpoint:
        """Return the state before the first step."""
        weights = self._student.weights
        zeros = {name: mx.zeros_like(array) for name, array in weights.items()}
        return TrainingCheckpoint(weights, Moments(zeros, dict(zeros)), Position())

    def run(
        self,
        checkpoint: TrainingCheckpoint,
        budget: Budget,
        control: RunControl,
        save: Callable[[TrainingCheckpoint], None],
    ) -> TrainingCheckpoint:
        """Train until the budget is spent or the session stops; return the final state."""
        weights, moments, position = checkpoint
        clock = _Clock(position.seconds)
        saved, losses = clock.seconds(), list[float]()
        pending: mx.array | None = None
        while budget.share(position) < 1 and not control.stopping:
            spent = budget.share(position)
            objective = self._objective(spent)
            updated = self._step(weights, moments, position.step, objective, spent)
            launch(updated)
            if pending is not None:
                losses.append(_finite(pending))
            pending, weights, moments = updated
            position = Position(position.step + 1, clock.seconds(), position.log)
            if self._is_log_time(position, budget):
                losses.append(_finite(pending))
                pending = None
                position = self._with_log_entry(weights, position, losses, objective)
                losses = []
            control.say(self._progress(position, budget.share(position), losses))
            if clock.seconds() - saved > self._settings.checkpoint_s:
                save(TrainingCheckpoint(weights, moments, position))
                saved = clock.seconds()
        if pending is not None:
            losses.append(_finite(pending))
        position = Position(position.step, clock.seconds(), position.log)
        done = TrainingCheckpoint(weights, moments, position)
        save(done)
        return done

    # ------------------------------------------------------------ one step

    def _objective(self, spent: float) -> Objective:
        return "ce" if spent < 1 - self._settings.finish else "tv"

    def _step(
        self, weights: Weights, moments: Moments, step: int, objective: Objective, spent: float
    ) -> _Updated:
        """Make one step: gradient, clipping, AdamW."""
        settings, distribution, loss = self._settings, self._distribution, LOSSES[objective]
        tokens, positions, importance = _on_device(self._batches.at(step))
        hidden = distribution.read_hidden(tokens, positions)
        p = distribution.compute_probabilities(hidden, settings.loss_temperature)

        def mean_loss(weights: Weights) -> mx.array:
            logits = self._student.logits(weights, tokens, positions)
            return _mean(loss(p, logits / settings.loss_temperature), importance)

        value, gradient = mx.value_and_grad(mean_loss)(weights)
        rate, count = mx.array(learning_rate(settings, spent)), mx.array(float(step + 1))
        new, moved = adamw(
            weights,
            clip(gradient, settings.clip),
            moments,
            count=count,
            rate=rate,
            decay=settings.weight_decay,
        )
        return _Updated(value, new, moved)

    # ------------------------------------------------------------ validation

    def _measure_acceptance(self, weights: Weights, inputs: DeviceBatch) -> mx.array:
        tokens, positions, importance = inputs
        hidden = self._distribution.read_hidden(tokens, positions)
        p = self._distribution.compute_probabilities(hidden, 1.0)
        q = mx.softmax(self._student.logits(weights, tokens, positions), axis=-1)
        return _mean(acceptance_bound(p, q), importance)

    def _with_log_entry(
        self, weights: Weights, position: Position, losses: list[float], objective: Objective
    ) -> Position:
        inputs = _on_device(self._validation.in_order(0))
        acceptance = number(self._measure_acceptance(weights, inputs))
        mean = sum(losses) / len(losses)
        entry = LogEntry(position.step, position.seconds, mean, objective, acceptance)
        return Position(position.step, position.seconds, [*position.log, entry])

    @staticmethod
    def _is_log_time(position: Position, budget: Budget) -> bool:
        if budget.steps:
            return position.step % max(1, budget.steps // _LOGS) == 0
        last = position.log[-1].seconds if position.log else 0.0
        return position.seconds - last > _LOG_EVERY_S

    def _progress(self, position: Position, spent: float, losses: list[float]) -> DistillProgress:
        if not losses:
            losses = [entry.loss for entry in position.log[-1:]]
        return DistillProgress(
            phase="training",
            done=min(1.0, spent),
            seconds_left=position.seconds * max(0.0, 1 - spent) / max(spent, 1e-9),
            tok_s=position.step * self._batches.tokens_per_step / max(position.seconds, 1e-9),
            loss=losses[-1] if losses else None,
            acceptance=position.log[-1].acceptance if position.log else None,
        )


class _Clock:
    """Training time over all calls."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._started = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds spent so far."""
        return self._before + time.monotonic() - self._started


def _on_device(batch: TrainingBatch) -> DeviceBatch:
    return DeviceBatch(mx.array(batch.tokens), mx.array(batch.positions), mx.array(batch.weights))


def _mean(values: mx.array, importance: mx.array) -> mx.array:
    return (values * importance).sum() / mx.maximum(importance.sum(), 1.0)


def _finite(loss: mx.array) -> float:
    value = number(loss)
    if not math.isfinite(value):
        raise RuntimeFailure(
            f"the loss became {value}; lower learning_rate and resume from the last checkpoint"
        )
    return value


def clip(gradient: Weights, largest: float) -> Weights:
    """Return the gradient, scaled down if its norm exceeds `largest`."""
    mlx: Any = optimizers  # its clipping lacks type hints
    scaled: Weights = mlx.clip_grad_norm(gradient, largest)[0]
    return scaled


def adamw(
    weights: Weights,
    gradient: Weights,
    moments: Moments,
    *,
    count: mx.array,
    rate: mx.array,
    decay: float,
) -> tuple[Weights, Moments]:
    """Make one AdamW step (Loshchilov, Hutter 2019); `count` is its number, from 1."""
    optimizer = optimizers.AdamW(0.0, betas=list(_BETAS), weight_decay=decay, bias_correction=True)
    optimizer.state["step"], optimizer.state["learning_rate"] = count, rate
    first, second, new = {}, {}, {}
    for name, weight in weights.items():
        state = {"m": moments.first[name], "v": moments.second[name]}
        new[name] = optimizer.apply_single(gradient[name], weight, state)
        first[name], second[name] = state["m"], state["v"]
    return new, Moments(first, second)
