"""A drafter's guesses under the noise of a position, and how sure it is of them."""

import numpy as np
import pytest

from protocol.decoding.gumbel import gumbel
from protocol.messages import Sampling
from services.drafter.backends.base import RoundOptions
from services.drafter.backends.growth import name_candidates
from services.sampling.candidates import best_of, perturb

VOCABULARY, ROWS = 40, 6000
OPTIONS = RoundOptions(siblings=3)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_confidence_is_how_often_the_target_chooses_so(temperature: float) -> None:
    """For a target whose logits differ from the drafter's by random amounts, at any temperature:
    guesses by rank, and the surer ones apart."""
    random = np.random.default_rng(3)
    logits = random.normal(0.0, 2.0, (ROWS, VOCABULARY)).astype(np.float32)
    target = logits + random.gumbel(size=logits.shape)
    sampling = Sampling(temperature=temperature, seed=11)
    positions = list(range(ROWS))
    ids = np.arange(VOCABULARY, dtype=np.uint32)[None]
    noise = gumbel(np, 11, positions, ids) if temperature else 0.0
    chosen = (target + temperature * noise).argmax(axis=-1)
    named = name_candidates(best_of(logits, VOCABULARY, None), positions, sampling, OPTIONS)
    for rank in range(1 + OPTIONS.siblings):
        sure = np.array([drafts[rank].confidence for drafts in named])
        right = np.array([drafts[rank].token for drafts in named]) == chosen
        for part in (sure >= 0.0, sure > np.median(sure)):
            assert right[part].mean() == pytest.approx(sure[part].mean(), abs=0.025)


def test_guesses_come_in_falling_order_and_sum_to_one_at_most() -> None:
    """Also where few candidates stand for the whole head, and filters drop some."""
    random = np.random.default_rng(4)
    rows = random.normal(0.0, 3.0, (50, VOCABULARY)).astype(np.float32)
    for sampling in (Sampling(temperature=0.8, seed=2), Sampling(temperature=1.0, top_k=3, seed=2)):
        top = perturb(best_of(rows, 8, None), list(range(50)), sampling)
        sure = np.array([top.confidences(row, 8) for row in range(50)])
        assert (np.diff(sure) <= 1e-7).all()
        assert (sure.sum(axis=-1) <= 1.0 + 1e-5).all()
        assert np.isfinite(sure).all()


def test_greedy_and_drawn_candidates_are_left_as_they_are() -> None:
    """There is no noise, or none that a drafter could know."""
    top = best_of(np.eye(4, dtype=np.float32), 3, None)
    assert perturb(top, [1, 2, 3, 4], Sampling()) is top
    drawn = Sampling(temperature=1.0, acceptance="rejection")
    assert perturb(top, [1, 2, 3, 4], drawn) is top
