"""Drafters that read the target, driven by hand: whatever order states come in, all draft alike."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from protocol.decoding.token_tree import read_tree
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import DraftedToken, Rows, TreeLayer

CHAIN = [203, 64, 5]
ORDERS = ("early", "late", "in pieces", "twice")
"""In which states may come."""


def open_sequence(backend: Any, tokens: Tokens, sampling: Sampling | None = None) -> Any:
    """The backend, with these tokens as its sequence 1."""
    for _ in backend.open(1, tokens, sampling or Sampling()):
        pass
    return backend


def grow(backend: Any, chain: Tokens = CHAIN, depth: int = 3) -> list[TreeLayer]:
    """The layers for the outcomes of a chain, two of each length."""
    found: Iterator[TreeLayer | None] = backend.prepare(
        1, read_tree(chain), [2] * len(chain), depth
    )
    return [layer for layer in found if layer is not None]


def check_order(order: str, opened: Callable[[Tokens], Any], prompt: Tokens, rows: Rows) -> None:
    """States of `prompt` and CHAIN that come in this order draft what others do."""
    expected = opened(prompt + CHAIN)
    expected.read(1, 0, rows)
    backend = opened(prompt)
    if order == "early":
        backend.read(1, 0, rows)
    grow(backend)
    if order == "in pieces":
        backend.read(1, 6, rows[6:])
        backend.read(1, 0, rows[:6])
    backend.commit(1, len(prompt), CHAIN)
    if order == "late":
        grow(backend, [1, 2])
        backend.read(1, 0, rows)
    if order == "twice":
        backend.read(1, 0, rows)
        grow(backend, [1, 2])
        backend.read(1, 2, rows[2:])
    for one, other in zip(grow(expected, [9, 8]), grow(backend, [9, 8]), strict=True):
        assert (one.outcomes, one.tokens) == (other.outcomes, other.tokens)


def check_company(
    backend: Any, begin: Callable[[int], Iterator[TreeLayer | None]], count: int
) -> None:
    """Sequences that take turns draft what each of them drafts alone.

    Args:
        backend: none of whose sequences is open.
        begin: opens the sequence of this number, and prepares three layers for it.
        count: how many sequences.
    """
    alone = []
    for number in range(count):
        alone.append([layer for layer in begin(number) if layer is not None])
        backend.close(number)
    work = [begin(number) for number in range(count)]
    grown: list[list[TreeLayer]] = [[] for _ in work]
    while any(len(layers) < 3 for layers in grown):
        for layers, steps in zip(grown, work, strict=True):
            if len(layers) < 3 and (layer := next(steps)) is not None:
                layers.append(layer)
    for expected, found in zip(alone, grown, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert (one.outcomes, one.tokens) == (other.outcomes, other.tokens)
            np.testing.assert_allclose(one.confidences, other.confidences, atol=1e-4)


def check_drafts(expected: list[DraftedToken], found: list[DraftedToken]) -> None:
    """The same drafts; another way to the same logits rounds their shares otherwise."""
    assert [draft.token for draft in expected] == [draft.token for draft in found]
    shares = ([draft.confidence for draft in drafts] for drafts in (expected, found))
    np.testing.assert_allclose(*shares, atol=1e-4)
