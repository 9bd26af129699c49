"""Real GGUF files, against llama.cpp: token ids of nasty texts, and greedy answers.

The files in `golden/` were written by llama.cpp from the same GGUF file: ids of texts with special
tokens read, answers of 48 tokens, and by how much each token's logit led.
"""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from orchestrator.text.tokenizer import TargetTokenizer
from services.mlx.loader import load

pytestmark = pytest.mark.real

GOLDEN = Path(__file__).with_name("golden")
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
NEAR_TIE = 0.6
"""Logits closer than this may change places: llama.cpp rounds activations to eight bits."""


def folder_of(name: str) -> Path:
    cache = os.environ.get("SSD_CACHE_DIR") or Path.home() / ".cache" / "ssd"
    folder = Path(cache) / "models" / name
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"the model is not set up: `ssd models add {name}`")
    return folder


def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_tokens_of_llama_cpp(name: str) -> None:
    """Spaces, line ends, scripts, emoji with joiners, control characters and special tokens.

    Known to differ: llama.cpp takes `</s>` for a control token by its text alone, which it is not
    in Qwen's vocabulary.
    """
    tokenizer = TargetTokenizer(folder_of(name))
    differ = [text for text, ids in golden(name)["texts"] if tokenizer.encode_text(text) != ids]
    assert differ == golden(name).get("known_to_differ", [])


@pytest.mark.parametrize("name", [name for name in NAMES if golden(name)["answers"]])
def test_greedy_answers_are_those_of_llama_cpp(name: str) -> None:
    """After each of its tokens ours is the same, unless two logits are nearly tied."""
    module: Any = load(folder_of(name)).module
    for answer in golden(name)["answers"]:
        prompt, tokens = answer["ids"], answer["answer"]
        logits = np.array(module(mx.array([prompt + tokens[:-1]]))[0, len(prompt) - 1 :])
        for place, token in enumerate(tokens):
            lead = float(logits[place].max() - logits[place][token])
            assert lead < NEAR_TIE, (answer["prompt"], place, lead, answer["margins"][place])
