"""Weights that are not numbers: the target's end the request, the drafter's cost speed only."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from launch.settings.settings import StackSettings
from protocol.errors import RuntimeFailure
from protocol.messages import Mode, Sampling
from services.sampling.candidates import best_of
from tests.support.stack import RunningStack, running
from tests.support.tiny_models import write_tiny_model


def poison(folder: Path) -> Path:
    """Make one weight of the last layer NaN, which reaches every logit."""
    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    name = "model.norm.weight"
    broken = np.array(weights[name].astype(mx.float32))
    broken[3] = np.nan
    weights[name] = mx.array(broken)
    mx.eval(weights)
    mx.save_safetensors(path, weights, {"format": "mlx"})
    return folder


def test_a_drafter_says_that_it_is_broken() -> None:
    """Rows with NaN are refused before a candidate is chosen from them."""
    with pytest.raises(RuntimeFailure, match="not numbers"):
        best_of(np.array([[1.0, 2.0], [np.nan, 0.0]]), 1, None)
    best_of(np.array([[1.0, -np.inf]]), 2, None)


@pytest.fixture
def pair(tmp_path: Path, run_dir: Path) -> tuple[Path, Path]:
    del run_dir
    return (
        write_tiny_model(tmp_path / "target", "llama", seed=1),
        write_tiny_model(tmp_path / "draft", "llama", seed=1, noise=0.1),
    )


def settings(target: Path, draft: Path) -> StackSettings:
    return StackSettings(model=str(target), draft_model=str(draft))


@pytest.mark.processes
def test_a_broken_drafter_costs_speed_only(pair: tuple[Path, Path]) -> None:
    """In both speculative modes the answer is that of plain decoding, without waits."""
    target, draft = pair
    with running(settings(target, poison(draft))) as stack:
        plain = stack.answer("one two three", mode="ar").tokens
        modes: tuple[Mode, ...] = ("sd", "ssd")
        for mode in modes:
            # On a busy machine even its failure may come late once.
            answer = stack.until(
                lambda answer: "late" not in answer.statistics.fallbacks,
                "nothing is waited for",
                partial(stack.answer, "one two three", mode=mode, num_draft_tokens=3),
            )
            assert plain == answer.tokens
            origins = answer.statistics.by_origin
            assert sum(origins[one].drafted for one in origins if one != "lookup") == 0


@pytest.mark.processes
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_broken_target_fails_the_request(pair: tuple[Path, Path], temperature: float) -> None:
    """The client is told that the logits are not numbers, and the next request too."""
    target, draft = pair
    with running(settings(poison(target), draft)) as stack:
        for _ in range(2):
            fails(stack, temperature)


def fails(stack: RunningStack, temperature: float) -> None:
    with pytest.raises(RuntimeFailure, match="not numbers"):
        stack.answer("one", sampling=Sampling(temperature=temperature))
