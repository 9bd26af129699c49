"""A trimmed head gives the full head's logits of the kept tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.utils import load_model

from protocol.errors import ModelError
from protocol.messages import Tokens
from services.mlx.lm_head import trim_head
from services.mlx.loader import load
from tests.support.reference import tiny_folder
from tests.support.tiny_models import SLOTTED, write_tiny_model

IDS = [5, 0, 287, 44, 45, 130]
TOKENS = mx.array([[0, 2, 97, 41, 250, 33, 8]])


def folder_with(base: Path, content: str, family: str = "llama") -> Path:
    folder = shutil.copytree(tiny_folder(family), base / "m")
    (folder / "draft_head.json").write_text(content, encoding="utf-8")
    return folder


def logits_of(module: Any) -> npt.NDArray[np.float32]:
    return np.array(module(TOKENS).astype(mx.float32))


@pytest.mark.parametrize("family", SLOTTED)
def test_columns_are_those_of_the_kept_tokens(family: str, tmp_path: Path) -> None:
    """Column i is the logit of the i-th kept id, in the order of the file; the input side stays."""
    folder = folder_with(tmp_path, json.dumps(IDS), family)
    module = load(folder).module
    expected = logits_of(module)[..., IDS]
    ids = trim_head(module, folder)
    assert ids is not None
    assert ids.tolist() == IDS
    assert ids.dtype == np.int64
    np.testing.assert_allclose(expected, logits_of(module), atol=1e-4)


@pytest.mark.parametrize("most", [None, 2, 100])
def test_the_first_tokens_are_kept(most: int | None, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, json.dumps(IDS))
    module = load(folder).module
    expected = logits_of(module)[..., IDS[:most]]
    ids = trim_head(module, folder, most)
    assert ids is not None
    assert ids.tolist() == IDS[:most]
    np.testing.assert_allclose(expected, logits_of(module), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", [(32, 4, "affine"), (64, 8, "affine"), (32, 4, "mxfp4")])
def test_quantised_heads_are_trimmed(
    quantization: tuple[int, int, str], tmp_path: Path, *, tied: bool
) -> None:
    """Where weights stay quantised, the kept rows are dequantised.

    Rows are longer than a group, those of the attention's output, too: with one group a row,
    MLX's product for Hopper is no number.
    """
    settings = dict(zip(("group_size", "bits", "mode"), quantization, strict=True))
    config = {"quantization": settings, "tie_word_embeddings": tied}
    config |= {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    folder = write_tiny_model(tmp_path / "m", "llama", config=config)
    (folder / "draft_head.json").write_text(json.dumps(IDS), encoding="utf-8")
    module: Any = load_model(folder)[0]
    expected = logits_of(module)[..., IDS]
    trim_head(module, folder)
    np.testing.assert_allclose(expected, logits_of(module), atol=1e-3)


def test_without_the_file_nothing_changes(tmp_path: Path) -> None:
    """A folder without `draft_head.json` keeps its head."""
    module = load(tiny_folder("llama")).module
    embedding = module.model.embed_tokens
    assert trim_head(module, tiny_folder("llama")) is None
    assert module.model.embed_tokens is embedding


BROKEN: dict[str, str] = {
    "": "is not a list of token ids",
    "{": "is not a list of token ids",
    "{}": "is not a list of token ids",
    '["a"]': "is not a list of token ids",
    "[[1], [2, 3]]": "is not a list of token ids",
    "[null]": "is not a list of token ids",
    "[1.5, 2.5]": "is not a list of token ids",
    "[true, false]": "is not a list of token ids",
    "[[1, 2]]": "is not a list of token ids",
    "7": "is not a list of token ids",
    "[]": "outside 0..287",
    "[-1, 3]": "is not a list of token ids",
    "[288]": "outside 0..287",
    "[99999999999999999999999]": "is not a list of token ids",
    "[3, 4, 3]": "names a token id twice",
}


@pytest.mark.parametrize("content", BROKEN)
def test_broken_lists_are_refused(content: str, tmp_path: Path) -> None:
    """What is not a list of distinct ids of the vocabulary is a ModelError that names the file."""
    folder = folder_with(tmp_path, content)
    module = load(tiny_folder("llama")).module
    with pytest.raises(ModelError, match=BROKEN[content]) as error:
        trim_head(module, folder)
    assert str(folder / "draft_head.json") in str(error.value)


def test_any_id_of_the_vocabulary_may_be_kept(tmp_path: Path) -> None:
    """All ids, from the first to the last, are allowed."""
    everything: Tokens = list(range(288))
    folder = folder_with(tmp_path, json.dumps(everything))
    module = load(folder).module
    expected = logits_of(module)
    trim_head(module, folder)
    np.testing.assert_allclose(expected, logits_of(module), atol=1e-4)
