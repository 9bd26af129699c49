"""Texts of the target: many at a time, as if one by one, and every token's kind known."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.distill.generation import ChatFormat, Rows, generate
from services.mlx.loader import load
from tests.support.tiny_models import vocabulary_size, write_tiny_model

OPENING, TURN, STOPS = [0, 2], [3, 7], [1]
CHAT = ChatFormat(TURN, STOPS, user_tokens=6)
PROMPTS = [[5, 9, 40], [17, 30, 31, 32, 33, 34], [8, 8]]


def tiny(folder: Path, family: str) -> Any:
    return load(write_tiny_model(folder / family, family)).module


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny(tmp_path_factory.mktemp("target"), "llama")


def never() -> bool:
    return False


def one_by_one(model: Any, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < length and (len(tokens) == len(prompt) or tokens[-1] not in STOPS):
        logits = model(mx.array(tokens)[None])[0, -1, : vocabulary_size()]
        tokens.append(int(mx.argmax(logits).item()))
    return tokens


@pytest.mark.parametrize("family", ["llama", "sliding", "gemma2", "qwen2"])
def test_a_batch_is_its_rows(tmp_path: Path, family: str) -> None:
    """Greedy answers to prompts of several lengths equal those computed alone without a cache."""
    model = tiny(tmp_path, family)
    rows = Rows(PROMPTS, invents=False, temperatures=[0.0] * 3, length=40, seed=0)
    made = generate(model, vocabulary_size(), rows, CHAT, never)
    assert made is not None
    for row, prompt in enumerate(PROMPTS):
        expected = one_by_one(model, prompt, 40)
        assert expected == made[0][row, : len(expected)].tolist()
        answered = len(expected) - len(prompt)
        kinds = [1] * len(prompt) + [3] * answered + [0] * (40 - len(expected))
        assert kinds == made[1][row].tolist()


def test_rows_outgrow_a_bucket(target: Any) -> None:
    """Past 128 tokens the buffers grow and the text stays what it is alone."""
    rows = Rows([[5, 9]], invents=False, temperatures=[0.0], length=140, seed=0)
    made = generate(target, vocabulary_size(), rows, ChatFormat([], [], 1), never)
    assert made is not None
    logits = target(mx.array(made[0][:, :-1]))[0, 1:]
    assert np.array(mx.argmax(logits, axis=-1)).tolist() == made[0][0, 2:].tolist()


def test_invented_conversations_have_the_templates_form(target: Any) -> None:
    """Opening, at most so many words of the user, the turn, the answer up to its stop token."""
    rows = Rows([OPENING] * 64, invents=True, temperatures=[0.0, 1.0] * 32, length=48, seed=3)
    made = generate(target, vocabulary_size(), rows, CHAT, never)
    assert made is not None
    for tokens, kinds in zip(*made, strict=True):
        form = "".join("PGUA"[kind] for kind in kinds)
        assert re.fullmatch("G{2}U{0,6}G{2}A*P*", form), form
        text = tokens.tolist()
        assert text[:2] == OPENING
        start = form.index("A") if "A" in form else form.rindex("G") + 1
        assert text[start - 2 : start] == TURN
        answer = text[start : len(form.rstrip("P"))]
        assert not set(answer[:-1]) & set(STOPS)
        assert ("P" in form) <= (answer[-1] in STOPS)
        assert not any(text[len(form.rstrip("P")) :])


def test_temperatures_are_the_rows_own(target: Any) -> None:
    """Sampled tokens follow softmax(logits / T), and greedy rows among them stay greedy."""
    count = 3000
    temperatures = [0.0] + [0.5] * count
    rows = Rows([[5, 9]] * (count + 1), invents=False, temperatures=temperatures, length=3, seed=1)
    made = generate(target, vocabulary_size(), rows, CHAT, never)
    assert made is not None
    logits = target(mx.array([[5, 9]]))[0, -1, : vocabulary_size()]
    law = np.array(mx.softmax(logits / 0.5))
    drawn = np.bincount(made[0][1:, 2], minlength=law.size) / count
    assert int(law.argmax()) == made[0][0, 2]
    expected_tv = 0.5 * np.sqrt(2 * law * (1 - law) / (np.pi * count)).sum()
    assert 0.5 * np.abs(drawn - law).sum() < 1.5 * expected_tv


def test_a_batch_can_be_given_up(target: Any) -> None:
    """A wish to stop ends the batch without a result."""
    rows = Rows([[5, 9]], invents=False, temperatures=[0.0], length=100, seed=0)
    assert generate(target, vocabulary_size(), rows, CHAT, lambda: True) is None


def test_rows_end_early_with_some_answer(target: Any) -> None:
    """Without more time, once every row has begun to answer; no earlier, and no later."""
    rows = Rows([OPENING] * 8, invents=True, temperatures=[0.7] * 8, length=128, seed=3)
    made = generate(target, vocabulary_size(), rows, CHAT, never, enough=lambda: True)
    assert made is not None
    kinds = made[1]
    assert kinds.shape == (8, 128)
    assert (kinds == 3).any(axis=1).all()
    assert not kinds[:, 64:].any()
