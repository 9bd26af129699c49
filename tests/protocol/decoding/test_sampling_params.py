"""What sampling parameters mean together, and which distributions can be true."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.sampling_params import (
    check_sampling,
    drafter_sampling,
    is_valid_distribution,
    uses_rejection,
)
from protocol.errors import UsageError
from protocol.messages import DraftDistribution, LogitsOptions, Sampling
from ssd_decode import SamplingParams

WARM = Sampling(temperature=0.7, top_p=0.9)


def changed(**changes: object) -> Sampling:
    return msgspec.structs.replace(WARM, **changes)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(draft_temperature=0.5), "temperature above 0"),
        (Sampling(draft_top_p=0.5), "temperature above 0"),
        (changed(saguaro=0.4), "rejection rule"),
        (Sampling(acceptance="rejection", saguaro=0.4), "temperatures above 0"),
        (changed(acceptance="rejection", saguaro=0.4, draft_temperature=0.0), "above 0"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(sampling: Sampling, words: str) -> None:
    """A sentence says what is missing, on the command line and in Python."""
    with pytest.raises(UsageError, match=words):
        check_sampling(sampling)
    with pytest.raises(UsageError, match=words):
        SamplingParams(
            temperature=sampling.temperature,
            acceptance=sampling.acceptance,
            draft_temp=sampling.draft_temperature,
            draft_top_p=sampling.draft_top_p,
            saguaro_c=sampling.saguaro,
        )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(acceptance="rejection"),
        changed(draft_temperature=0.0, draft_top_p=0.5),
        changed(acceptance="rejection", saguaro=0.0),
        changed(acceptance="rejection", saguaro=0.4, draft_temperature=1.5),
    ],
    ids=str,
)
def test_what_has_a_meaning_is_not(sampling: Sampling) -> None:
    """Both rules take a drafter's own distribution; at temperature 0 they are one."""
    check_sampling(sampling)
    assert uses_rejection(sampling) == (
        sampling.acceptance == "rejection" and sampling.temperature > 0
    )


def test_the_api_passes_everything_on() -> None:
    """Every parameter arrives under the name that the protocol has for it."""
    expected = changed(acceptance="rejection", draft_temperature=1.5, draft_top_p=0.8, saguaro=0.4)
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        seed=0,
        acceptance="rejection",
        draft_temp=1.5,
        draft_top_p=0.8,
        saguaro_c=0.4,
    )
    assert expected == params.request(1, "hello").sampling


def test_the_drafter_follows_the_target_unless_told_otherwise() -> None:
    """None is the target's own parameter; the rest is shared."""
    assert drafter_sampling(WARM) == WARM
    sampling = drafter_sampling(changed(draft_temperature=1.5, draft_top_p=0.5))
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.5, 0.5, WARM.seed)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=64), st.integers(0, 63))
def test_a_law_is_sound_if_the_token_could_be_drawn(weights: list[float], index: int) -> None:
    """Distinct tokens, probabilities that sum to 1, and some of it the token's."""
    index %= len(weights)
    total = sum(weights)
    if total == 0.0:
        return
    distribution = DraftDistribution(
        [3 * at for at in range(len(weights))], [w / total for w in weights]
    )
    assert is_valid_distribution(distribution, 3 * index) == (
        distribution.probabilities[index] > 0.0
    )
    assert not is_valid_distribution(distribution, 1)
    assert is_valid_distribution(DraftDistribution(), 1)


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (Sampling(logits_options=LogitsOptions(repetition_penalty=1e-40)), r"repetition_penalty"),
        (Sampling(logits_options=LogitsOptions(repetition_penalty=1e30)), r"must be at most 10"),
        (
            Sampling(logits_options=LogitsOptions(logit_bias=((1, 1e30),))),
            r"logit_bias\[0\]\[1\] must be at most 100",
        ),
        (Sampling(logits_options=LogitsOptions(logit_bias=((1, float("nan")),))), r"logit_bias"),
        (Sampling(logits_options=LogitsOptions(frequency_penalty=-3.0)), r"must be at least -2"),
        (Sampling(temperature=float("nan")), r"temperature must be at least 0"),
        (Sampling(temperature=float("inf")), r"temperature must be at most 100"),
        (Sampling(top_p=0.0), r"top_p must be above 0"),
        (Sampling(min_p=1.0), r"min_p must be below 1"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(sampling: Sampling, why: str) -> None:
    """By its name and with the limit, before any model sees it."""
    with pytest.raises(UsageError, match=why):
        check_sampling(sampling)
