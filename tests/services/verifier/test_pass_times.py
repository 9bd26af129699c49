"""What is measured of a target before it is used, and that nothing of that stays."""

from pathlib import Path

import pytest

from services.mlx.loader import load
from services.verifier.pass_times import measure_passes
from services.verifier.verifier import Verifier
from tests.services.verifier.test_not_a_number import poison
from tests.support.reference import tiny_folder
from tests.support.tiny_models import write_tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("by_themselves", [False, True])
def test_passes_that_the_target_can_verify_are_measured(
    family: str, *, by_themselves: bool
) -> None:
    """A single token in any case; chains and trees as far as it takes them."""
    verifier = Verifier(load(tiny_folder(family)), 512)
    times = measure_passes(verifier, by_themselves=by_themselves)
    assert 1 in times.chains
    assert max(times.chains) <= verifier.max_draft_tokens + 1
    assert bool(times.trees) == verifier.takes_trees or len(times.chains) == 1
    assert all(ms > 0.0 for ms in [*times.chains.values(), *times.trees.values()])
    assert not verifier._sequences


def test_a_slow_target_is_measured_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is over no further pass begins."""
    monkeypatch.setattr("services.verifier.pass_times._BUDGET_S", 0.0)
    times = measure_passes(Verifier(load(tiny_folder("llama")), 512), by_themselves=True)
    assert list(times.chains) == [1]
    assert not times.trees


def test_a_broken_target_is_left_to_its_requests(tmp_path: Path) -> None:
    """Its logits are NaN: it starts all the same."""
    verifier = Verifier(load(poison(write_tiny_model(tmp_path / "m", "llama"))), 512)
    assert not measure_passes(verifier, by_themselves=True).chains
    assert not verifier._sequences
