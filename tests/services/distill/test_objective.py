"""What the drafter is trained on, against numpy on small laws."""

import mlx.core as mx
import numpy as np
import pytest

from services.distill.checkpoint import Moments
from services.distill.objective import LOSSES, Objective, acceptance_bound, overlap
from services.distill.training import adamw, clip

P = np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.1, 0.1]])  # the last lacks reach
LOGITS = np.array([[0.2, -1.0, 0.5], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
Q = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)

VALUES = {
    "ce": -(P * np.log(Q)).sum(axis=1),
    "tv": 1 - np.minimum(P, Q).sum(axis=1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_their_formulas(name: Objective) -> None:
    """Each loss equals its formula, with the mass that a trimmed head cannot reach counted."""
    loss = LOSSES[name]
    found = np.array(loss(mx.array(P), mx.array(LOGITS)))
    np.testing.assert_allclose(found, VALUES[name], rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_pull_towards_the_target(name: Objective) -> None:
    """A small step against the gradient lowers every loss and raises the best token's logit."""
    loss = LOSSES[name]
    p, logits = mx.array(P[:1]), mx.array(LOGITS[:1])

    def total(at: mx.array) -> mx.array:
        return loss(p, at).sum()

    gradient = mx.grad(total)(logits)
    assert total(logits - 0.01 * gradient).item() < total(logits).item()
    assert np.array(gradient)[0, 0] < 0


def test_acceptance() -> None:
    """The sum of the minima, and its share of that of the maxima, out of reach included."""
    minima = np.minimum(P, Q).sum(axis=1)
    maxima = np.maximum(P, Q).sum(axis=1) + 1 - P.sum(axis=1)  # q is 0 out of reach
    p, q = mx.array(P), mx.array(Q)
    np.testing.assert_allclose(np.array(overlap(p, q)), minima, rtol=1e-5)
    np.testing.assert_allclose(np.array(acceptance_bound(p, q)), minima / maxima, rtol=1e-5)


def test_adamw_first_step() -> None:
    """The first step has the size of the rate, against the gradient's sign, plus the decay."""
    weights = {"w": mx.array([1.0, -2.0])}
    zeros = {"w": mx.zeros(2)}
    new, moments = adamw(
        weights,
        {"w": mx.array([0.3, -5.0])},
        Moments(zeros, zeros),
        count=mx.array(1.0),
        rate=mx.array(0.1),
        decay=0.01,
    )
    np.testing.assert_allclose(np.array(new["w"]), [1 - 0.1 - 0.001, -2 + 0.1 + 0.002], rtol=1e-5)
    np.testing.assert_allclose(np.array(moments.first["w"]), [0.03, -0.5], rtol=1e-5)


def test_the_gradient_is_clipped_as_a_whole() -> None:
    """Norm 5 with a limit of 1: everything is divided by 5; below the limit nothing changes."""
    gradient = {"a": mx.array([3.0]), "b": mx.array([4.0])}
    small = clip(gradient, 1.0)
    np.testing.assert_allclose([small["a"].item(), small["b"].item()], [0.6, 0.8], rtol=1e-5)
    assert clip(gradient, 10.0)["b"].item() == 4.0
