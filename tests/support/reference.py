"""The yardstick: what mlx-lm itself computes from a tiny model folder."""

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from protocol.decoding.sampler import Floats, sample
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import DraftedToken, TreeLayer
from services.engine.target_model import TargetModel, prepare
from services.kernels.cpu.equip import equip
from services.kv.prefix_cache import PrefixCache
from services.mlx.loader import LoadedModel, compute_unit, load
from services.verifier.verifier import Verifier
from tests.support.tiny_models import write_tiny_model

SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=7),
    "filtered": Sampling(temperature=0.8, top_p=0.9, min_p=0.02, seed=8),
}


@cache
def _base() -> Path:
    base = Path(tempfile.mkdtemp(prefix="ssd-tiny-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    return base


@cache
def tiny_folder(family: str, seed: int = 0) -> Path:
    """The folder of a tiny model, written once; tests must not change it."""
    return write_tiny_model(_base() / f"{family}-{seed}", family, seed=seed)


class Reference:
    """A model under mlx-lm: its own layers, and fresh caches of its own for every question."""

    def __init__(self, folder: Path) -> None:
        module: Any = load_model(folder)[0]
        module.set_dtype(mx.float32)
        self.module = module

    def rows(self, sequences: list[Tokens]) -> list[Floats]:
        """Per sequence the logits after each of its tokens, [tokens, head]."""
        longest = max(map(len, sequences))
        # Padding comes after the tokens, where a causal model does not see it.
        batch = mx.array([tokens + [0] * (longest - len(tokens)) for tokens in sequences])
        logits = np.array(self.module(batch, cache=make_prompt_cache(self.module)))
        return [row[: len(tokens)] for row, tokens in zip(logits, sequences, strict=True)]

    def decode(self, prompt: Tokens, sampling: Sampling) -> Iterator[int]:
        """Plain decoding without an end: the prompt at once, then token by token."""
        caches = make_prompt_cache(self.module)
        position, news = len(prompt), prompt
        while True:
            row = np.array(self.module(mx.array([news]), cache=caches)[0, -1:])
            news = sample(row, [position], sampling)
            position += 1
            yield news[0]

    def decoded(self, prompt: Tokens, count: int, sampling: Sampling) -> Tokens:
        """The first `count` tokens of plain decoding."""
        return list(islice(self.decode(prompt, sampling), count))


@cache
def reference(family: str, seed: int = 0) -> Reference:
    """The yardstick of a tiny model."""
    return Reference(tiny_folder(family, seed))


class _Answer:
    """An answer that is decoded as far as anybody has asked for."""

    def __init__(self, family: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        self._rest = reference(family).decode(list(prompt), sampling)
        self.tokens: Tokens = []

    def take(self, count: int) -> Tokens:
        self.tokens += islice(self._rest, max(0, count - len(self.tokens)))
        return self.tokens[:count]


_answer = cache(_Answer)


def plain(family: str, prompt: tuple[int, ...], count: int, sampling: Sampling) -> Tokens:
    """`Reference.decoded`, remembered."""
    return _answer(family, prompt, sampling).take(count)


@cache
def _tiny_target(family: str) -> tuple[LoadedModel, TargetModel | None]:
    model = load_target(tiny_folder(family))
    return model, prepare_shared(model.module)


def load_target(folder: Path) -> LoadedModel:
    """Load a target, with the yardstick's arithmetic."""
    model = load(folder)
    if compute_unit() == "cpu":
        equip(model.module, rounds=False)
    return model


def prepare_shared(module: Any) -> TargetModel | None:
    """Prepare a target for several verifiers; on a GPU, where traces and tables are not for two,
    each prepares its own."""
    return prepare(module) if compute_unit() == "cpu" else None


def tiny_verifier(family: str, step: int = 512, prompts: PrefixCache | None = None) -> Verifier:
    """A new verifier of a tiny model, which is loaded and tried once; nothing may change it."""
    model, target = _tiny_target(family)
    return Verifier(model, step, prompts, target)


for_the_cpu = pytest.mark.skipif(
    mx.cuda.is_available(), reason="there is CUDA here, and it is about MLX's CPU backend"
)
"""Of tests of what is done for a CPU alone, such as the same bits in any company."""


T = TypeVar("T")


def said(answers: Iterable[T | None]) -> list[T]:
    """What a service or backend yielded, without the pauses."""
    return [answer for answer in answers if answer is not None]


def drafts(layers: Iterable[TreeLayer | None]) -> list[DraftedToken]:
    """The tokens of a draft without branches, and what is known of them."""
    return [
        DraftedToken(layer.tokens[0], layer.confidences[0], *layer.distributions)
        for layer in said(layers)
    ]
