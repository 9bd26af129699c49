"""The models that other tests stand on are what they promise to be."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.vocabulary import read_vocabulary
from protocol.messages import Sampling
from tests.support.reference import Reference, plain, reference, tiny_folder
from tests.support.tiny_models import FAMILIES, write_tiny_model

PROMPT = (0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_forward_equals_token_by_token(family: str) -> None:
    """mlx-lm gives the same tokens over a whole sequence as one at a time, far past the window."""
    answer = plain(family, PROMPT, 28, Sampling())
    [rows] = reference(family).rows([[*PROMPT, *answer]])
    assert answer == rows[len(PROMPT) - 1 : -1].argmax(axis=-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_laws_are_peaked_but_not_constant(family: str) -> None:
    """The best token leads clearly on average, and is not always the same one."""
    answer = plain(family, PROMPT, 28, Sampling())
    [rows] = reference(family).rows([[*PROMPT, *answer]])
    best = np.sort(rows[len(PROMPT) :], axis=-1)
    assert (best[:, -1] - best[:, -2]).mean() > 0.5
    assert len(set(answer)) >= 5


def test_any_two_make_a_pair() -> None:
    """All families have one vocabulary."""
    assert len({read_vocabulary(tiny_folder(family)) for family in FAMILIES}) == 1


def test_models_are_functions_of_their_arguments(tmp_path: Path) -> None:
    """The same arguments give the same weights, another seed or noise gives others."""
    path = write_tiny_model(tmp_path / "a", "llama") / "model.safetensors"
    same = write_tiny_model(tmp_path / "b", "llama") / "model.safetensors"
    seed = write_tiny_model(tmp_path / "c", "llama", seed=1) / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    loaded: list[Any] = [mx.load(str(p)) for p in (path, same, seed)]
    first, second, third = (np.array(weights[name]) for weights in loaded)
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - third).max() > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_little_noise_makes_a_good_drafter(family: str, tmp_path: Path) -> None:
    """Most tokens stay the same; a drafter with another seed agrees on hardly any."""
    sequence = [*PROMPT, *plain(family, PROMPT, 28, Sampling())]
    [rows] = reference(family).rows([sequence])
    agreement = []
    for name, options in (("near", {"noise": 0.01}), ("far", {"seed": 1})):
        folder = write_tiny_model(tmp_path / name, family, **options)
        [other] = Reference(folder).rows([sequence])
        agreement.append((rows.argmax(-1) == other.argmax(-1)).mean())
    assert agreement[0] > 0.7
    assert agreement[1] < 0.2


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_can_be_chosen(family: str, tmp_path: Path) -> None:
    """A model may have more layers than three; the configuration says how many."""
    folder = write_tiny_model(tmp_path / "m", family, layers=4)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 4
    assert Reference(folder).rows([[1, 2]])[0].shape[0] == 2
