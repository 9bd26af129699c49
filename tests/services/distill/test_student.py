"""The drafter before training: a copy of some of the target's layers."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import ModelError, SsdError, UsageError
from services.distill.logits import TargetDistribution, check_layout, logits_at
from services.distill.student import (
    Student,
    chosen_layers,
    drafter_config,
    frequent_ids,
    new_student,
    read_config,
)
from services.mlx.loader import load, to_dense
from tests.support.tiny_models import write_tiny_model

TOKENS = mx.array([[5, 9, 40, 17, 30], [8, 8, 20, 21, 22]])
POSITIONS = mx.array([0, 4, 7])
FAMILIES = ("llama", "llama3", "sliding", "qwen2", "qwen3", "gemma2", "gemma3", "moe", "quantized")


def student_of(folder: Path, layers: list[int], mlp: int = 0) -> tuple[Any, Student]:
    target = load(folder).module
    to_dense(target, mx.float32)
    config = drafter_config(read_config(folder), layers, mlp)
    return target, new_student(target, config, layers, None, mx.float32)


def test_layers_come_from_both_ends() -> None:
    """1, 2, 3, 4 of 30 layers; given ones as they are; impossible ones are refused."""
    assert chosen_layers(30, 1, []) == [0]
    assert chosen_layers(30, 2, []) == [0, 29]
    assert chosen_layers(30, 3, []) == [0, 1, 29]
    assert chosen_layers(30, 4, []) == [0, 1, 28, 29]
    assert chosen_layers(30, 2, [3, 7, 9]) == [3, 7, 9]
    for total, count, given in ((2, 3, []), (4, 2, [1, 4]), (4, 2, [1, 1])):
        with pytest.raises(UsageError):
            chosen_layers(total, count, given)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_all_layers_is_the_target(tmp_path: Path, family: str) -> None:
    """With all layers and the whole head, the untrained drafter has the target's logits."""
    target, student = student_of(write_tiny_model(tmp_path, family), [0, 1, 2])
    expected = target(TOKENS).reshape(-1, target(TOKENS).shape[-1])[POSITIONS]
    found = student.logits(student.weights, TOKENS, POSITIONS)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama3", "gemma2"])
def test_only_layers_and_norms_are_trained(tmp_path: Path, family: str) -> None:
    """Embedding and head are not among the weights; every weight gets a gradient."""
    _, student = student_of(write_tiny_model(tmp_path, family), [0, 2])
    assert not [name for name in student.weights if "embed" in name or "lm_head" in name]

    def loss(weights: dict[str, mx.array]) -> mx.array:
        return mx.square(student.logits(weights, TOKENS, POSITIONS)).sum()

    gradient = mx.grad(loss)(student.weights)
    assert gradient.keys() == student.weights.keys()
    # The first position of a row attends to itself alone; the others use every weight.
    assert all(mx.abs(array).max().item() > 0 for array in gradient.values())


def test_layers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A family whose layers differ in shape says so in one sentence."""
    with pytest.raises(SsdError):
        student_of(write_tiny_model(tmp_path / "g", "gemma4"), [0, 2])
    with pytest.raises(ModelError, match=r"no model\.layers"):
        check_layout(object())


def test_a_narrower_mlp_keeps_its_largest_columns(tmp_path: Path) -> None:
    """Half the hidden columns: those with the largest product of norms, in their old order."""
    target, student = student_of(write_tiny_model(tmp_path, "llama"), [0, 2], mlp=48)
    mlp = target.model.layers[2].mlp
    norms = [np.linalg.norm(np.array(mlp.down_proj.weight), axis=0)]
    norms += [np.linalg.norm(np.array(m.weight), axis=1) for m in (mlp.gate_proj, mlp.up_proj)]
    kept = np.sort(np.argsort(-np.prod(norms, axis=0))[:48])
    down = np.array(student.weights["model.layers.1.mlp.down_proj.weight"])
    np.testing.assert_array_equal(down, np.array(mlp.down_proj.weight)[:, kept])
    assert student.logits(student.weights, TOKENS, POSITIONS).shape == (3, 288)


def test_configuration_of_a_drafter() -> None:
    """Per-layer lists follow the layers, quantisation goes, stop tokens stay."""
    target = {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "c"],
        "eos_token_id": [1, 2, 3],
        "mlp_only_layers": [2],
        "quantization": {"bits": 4},
        "intermediate_size": 96,
    }
    expected = {
        "num_hidden_layers": 2,
        "layer_types": ["a", "c"],
        "eos_token_id": [1, 2, 3],
        "mlp_only_layers": [1],
        "intermediate_size": 48,
    }
    assert expected == drafter_config(target, [0, 2], 48)
    with pytest.raises(UsageError):
        drafter_config(target, [0, 2], 97)


def test_a_trimmed_head_keeps_the_frequent_tokens(tmp_path: Path) -> None:
    """Stop tokens first, then the most frequent, unseen ones by id; columns are those ids'."""
    tokens = np.array([7, 7, 7, 3, 3, 9])
    assert frequent_ids(tokens, 20, 3, [1]).tolist() == [1, 7, 3]
    assert frequent_ids(tokens, 20, 6, [1]).tolist() == [1, 7, 3, 9, 0, 2]
    folder = write_tiny_model(tmp_path, "llama")
    target = load(folder).module
    ids = np.array([4, 7, 200])
    config = drafter_config(read_config(folder), [0, 1, 2], 0)
    student = new_student(target, config, [0, 1, 2], ids, mx.float32)
    whole = logits_at(target, TOKENS, POSITIONS)
    found = student.logits(student.weights, TOKENS, POSITIONS)
    np.testing.assert_allclose(np.array(found), np.array(whole)[:, ids], rtol=1e-4, atol=1e-4)


def test_the_law_of_a_trimmed_head_is_not_renormalised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's law over the kept tokens keeps its probabilities; padding columns get none."""
    monkeypatch.setattr("services.distill.logits.MOST_LOGITS", 2 * 288)
    target = load(write_tiny_model(tmp_path, "qwen2")).module
    ids = mx.array([4, 7, 200])
    law = TargetDistribution(target, 288, ids)
    hidden = law.read_hidden(TOKENS, POSITIONS)
    logits = law.logits(hidden)
    assert logits.shape == (3, 288)
    assert [chunk.stop for chunk in law.split(3)] == [2, 3]
    full = np.array(mx.softmax(logits / 0.7, axis=-1))
    found = np.array(law.compute_probabilities(hidden, 0.7))
    np.testing.assert_allclose(found, full[:, [4, 7, 200]], rtol=1e-5)
