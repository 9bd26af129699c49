"""Real GGUF files, against llama.cpp: token ids of nasty texts, and greedy answers.

The files in `golden/` were written by llama.cpp from the same GGUF file: ids of texts with special
tokens read; and for answers of up to 48 tokens each token, the runner-up, and by how much its
logit trailed. `rms` there is how far our leads over the runner-up were from llama.cpp's, over all
positions, when the file was written. `long`, of a model with windows: five windows of text, the log
probabilities of eight tokens after parts of it, and the answer to all of it.
"""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from orchestrator.text.tokenizer import TargetTokenizer
from services.kernels.cpu.equip import equip, takes
from services.mlx.loader import load

pytestmark = pytest.mark.real

GOLDEN = Path(__file__).with_name("golden")
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
NEAR_TIE = 3.0
"""In `rms`: logits closer than this may change places. At 99 of 100 positions, the leads of the
two programs differ by less than about this: each rounds activations to bytes in its own way."""
MOST_RMS = 1.5
"""In `rms`: more means that something is computed differently, not only rounded."""
STEP = 512
"""Tokens of a prompt that go through the model at a time."""


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


def loaded(name: str) -> Any:
    """The model, as a CPU computes it."""
    module: Any = load(folder_of(name), as_stored=takes).module
    equip(module)
    return module


def read(module: Any, cache: list[Any], tokens: list[int]) -> None:
    """Let tokens through the model; no logits are computed."""
    for first in range(0, len(tokens), STEP):
        module(mx.array([tokens[first : first + STEP]]), cache=cache)
        mx.eval([layer.state for layer in cache])


def check_answer(module: Any, cache: list[Any], answer: dict[str, Any], rms: float) -> list[float]:
    """Check an answer after all of its prompt but the last token; how far our leads are off."""
    tokens, margins = answer["answer"], np.array(answer["margins"])
    logits = module(mx.array([answer["ids"][-1:] + tokens[:-1]]), cache=cache)[0]
    rows = np.array(logits.astype(mx.float32))
    places = np.arange(len(tokens))
    own = rows[places, tokens]
    for place in places[rows.argmax(axis=1) != tokens]:
        assert margins[place] < NEAR_TIE * rms, (answer["ids"][-8:], place)
        assert rows[place].max() - own[place] < NEAR_TIE * rms, (answer["ids"][-8:], place)
    return list(own - rows[places, answer["second"]] - margins)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_llama_cpp(name: str) -> None:
    """After each of its tokens ours is the same, unless its lead over the runner-up is tiny."""
    module, rms, off = loaded(name), golden(name)["rms"], list[float]()
    for answer in golden(name)["answers"]:
        cache = make_prompt_cache(module)
        read(module, cache, answer["ids"][:-1])
        off += check_answer(module, cache, answer, rms)
    assert np.sqrt(np.mean(np.square(off))) < MOST_RMS * rms


@pytest.mark.parametrize("name", [name for name in NAMES if "long" in golden(name)])
def test_windows_are_those_of_llama_cpp(name: str) -> None:
    """Within the window, around its end, and at five times its length the next token is as likely.

    A prompt is read in steps that end at these places, so windows are cut in many ways.
    """
    module, rms, long = loaded(name), golden(name)["rms"], golden(name)["long"]
    ids, cache, done, off = long["ids"], make_prompt_cache(module), 0, list[float]()
    for end, likely in sorted((int(end), likely) for end, likely in long["next"].items()):
        if end == len(ids):
            break
        read(module, cache, ids[done : end - 1])
        logits = module(mx.array([ids[end - 1 : end]]), cache=cache)[0, 0]
        row = np.array(logits.astype(mx.float32))
        done = end
        tokens, expected = [token for token, _ in likely], [value for _, value in likely]
        differences = row[tokens] - np.logaddexp.reduce(row) - expected
        assert np.abs(differences).max() < NEAR_TIE * rms, end
        off += list(differences)
    read(module, cache, ids[done:-1])
    off += check_answer(module, cache, long, rms)
    assert np.sqrt(np.mean(np.square(off))) < MOST_RMS * rms
