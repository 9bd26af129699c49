"""The comparison that ends a conversion: its figures, and the positions that it looks at."""

import numpy as np
import pytest

from protocol.jobs.convert import ROUTES, Agreement, Route
from services.coreml.convert.parity import (
    AnsweredPrompt,
    ParityDistributions,
    acceptance,
    agreement,
    candidates,
    tops_of,
)
from tests.services.coreml.test_model import fed
from tests.support.converted import SLOTS, converted_folder, converted_model


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_agreement_of_a_model_with_itself_and_with_another() -> None:
    """Itself: 1, 1, 0. Another: less, and the margins of the differences are told."""
    ids = np.arange(100, 400)
    laws = ParityDistributions(rng().normal(size=(50, 300)).astype(np.float32) * 3, ids)
    same = agreement(laws, tops_of(laws, 64))
    assert (same.greedy, same.top8, same.worst_margin) == (1.0, 1.0, 0.0)
    assert abs(same.kl) < 1e-4
    other = ParityDistributions(
        laws.rows + np.random.default_rng(4).normal(size=laws.rows.shape).astype(np.float32), ids
    )
    apart: Agreement = agreement(laws, tops_of(other, 64))
    assert apart.greedy < 1
    assert apart.top8 < 1
    assert apart.kl > 0.05
    assert apart.worst_margin > 0
    assert apart.worst_margin == max(difference.margin for difference in apart.differences)
    assert len(apart.differences) == round(50 * (1 - apart.greedy_with_ties))
    assert all(difference.model != difference.package for difference in apart.differences)
    assert same.differences == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("length", [9, SLOTS - 20])
def test_every_route_judges_the_same_positions(route: Route, length: int) -> None:
    """Each token of the answer once, whatever functions it goes through, up to a full state."""
    model = converted_model(converted_folder("llama"))
    tokens = [int(token) for token in rng().integers(4, 280, length + 20)]
    tops = candidates(model, [AnsweredPrompt(tokens[:length], tokens[length:])], route)
    plain = fed(model, tokens[:-1], [("decode", 1)] * (len(tokens) - 1))[length - 1 :]
    assert len(tops) == 20
    for ours, theirs in zip(tops, plain, strict=True):
        assert ours.ids[0, 0] == theirs.ids[0, 0]
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-3)


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    """Of a target with itself nearly 1; of disjoint laws 0."""
    laws = ParityDistributions(rng().normal(size=(20, 50)).astype(np.float32) * 4, np.arange(50))
    own = acceptance(laws, 100, tops_of(laws, 50))
    assert own.greedy == 1.0
    assert own.sampled == pytest.approx(1.0, abs=1e-4)
    elsewhere = ParityDistributions(laws.rows, np.arange(50, 100))
    assert acceptance(laws, 100, tops_of(elsewhere, 50)).sampled == 0.0
