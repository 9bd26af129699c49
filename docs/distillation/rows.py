"""The texts of `texts.py` as batches for `train.py`."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from services.distill.data import ANSWER, Shards, join_texts

_STEP = 64
"""Lengths of batches are multiples of this."""
_HELD = 100
"""One row of so many is held out."""


class Batch(NamedTuple):
    """Rows of similar length and the distributions that their answers were drawn from."""

    tokens: torch.Tensor
    """[rows, length]"""
    positions: torch.Tensor
    """[count] flat positions whose next token belongs to an answer."""
    ids: torch.Tensor
    """[count, top] columns of the drafter's head, -1 if it has none."""
    logs: torch.Tensor
    """[count, top] log-probabilities at temperature 1."""
    rows: Any
    """[count] number of each position's row."""


class Rows:
    """All texts of some folders, in memory; `split` prepares them for training."""

    def __init__(self, folders: list[Path], device: str) -> None:
        self._device = device
        places = [folder / "data" for folder in folders]
        texts = join_texts([Shards(place).read() for place in places])
        self._tokens, self._kinds, self.infos = texts

        def read(name: str) -> Any:
            files = [path for place in places for path in sorted(place.glob(f"*.{name}.npy"))]
            return np.concatenate([np.load(path) for path in files])

        self._ids, self._logs = read("top_ids"), read("top_logs")
        drawn = self._kinds[:, 1:] == ANSWER
        self._first = np.concatenate([[0], np.cumsum(drawn.sum(1))])
        self._used = self._kinds.shape[1] - np.argmax(self._kinds[:, ::-1] > 0, axis=1)
        self._numbers = np.arange(len(self.infos))
        self.epoch = 0

    @property
    def answered(self) -> int:
        """Tokens of all answers."""
        return int(self._first[-1])

    def counts(self, vocabulary: int, device: str) -> torch.Tensor:
        """Return [vocabulary], how often each token occurs in answers."""
        counts = np.bincount(self._tokens[self._kinds == ANSWER], minlength=vocabulary)
        return torch.from_numpy(counts).to(device)

    def split(self, head: torch.Tensor) -> "Rows":
        """Number tokens as columns of the head; return the rows that are held out."""
        columns = np.full(int(max(self._ids.max(), head.max())) + 1, -1, np.int32)
        columns[head.cpu().numpy()] = np.arange(len(head))
        for start in range(0, len(self._ids), 1 << 20):
            part = self._ids[start : start + (1 << 20)]
            part[:] = columns[part]
        held = copy.copy(self)
        is_held = self._numbers % _HELD == 0
        held._numbers, self._numbers = self._numbers[is_held], self._numbers[~is_held]
        return held

    def batches(self, size: int, seed: int) -> Iterator[Batch]:
        """Yield batches of about `size` tokens, pass after pass, in an order of chance."""
        chance = np.random.default_rng(seed)
        waiting: Batch | None = None
        while True:
            parts = self._parts(size, chance.random(len(self._numbers)))
            for number in chance.permutation(len(parts)):
                # The next one is copied while the device still computes.
                waiting, ready = self._batch(parts[number]), waiting
                if ready is not None:
                    yield ready
            self.epoch += 1

    def in_order(self, size: int) -> Iterator[Batch]:
        """Yield batches that cover all rows once."""
        for part in self._parts(size, np.zeros(len(self._numbers))):
            yield self._batch(part)

    def _parts(self, size: int, jitter: Any) -> list[Any]:
        """Divide the rows into batches of similar length."""
        lengths = -(-self._used[self._numbers] // _STEP) * _STEP
        order = self._numbers[np.lexsort((jitter, lengths))]
        lengths = np.sort(lengths)
        parts, start = [], 0
        while start < len(order):
            end = start + 1
            while end < len(order) and (end + 1 - start) * lengths[end] <= size:
                end += 1
            parts.append(order[start:end])
            start = end
        return parts

    def _batch(self, numbers: Any) -> Batch:
        length = min(-(-int(self._used[numbers].max()) // _STEP) * _STEP, self._tokens.shape[1])
        drawn = np.zeros((len(numbers), length), bool)
        drawn[:, :-1] = self._kinds[numbers, 1:length] == ANSWER
        at = np.concatenate([np.arange(self._first[n], self._first[n + 1]) for n in numbers])
        rows = np.repeat(numbers, drawn.sum(1))

        def moved(array: Any, dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            if self._device != "cpu":
                tensor = tensor.pin_memory()
            return tensor.to(self._device, non_blocking=True).to(dtype)

        return Batch(
            moved(self._tokens[numbers, :length], torch.int64),
            moved(np.flatnonzero(drawn), torch.int64),
            moved(self._ids[at], torch.int64),
            moved(self._logs[at], torch.float32),
            rows,
        )


def frequent(counts: torch.Tensor, size: int, config: dict[str, Any]) -> torch.Tensor:
    """Return the ids of a head: the ends of answers and the most frequent tokens come first."""
    stops = config.get("eos_token_id") or []
    counts[stops if isinstance(stops, list) else [stops]] = int(counts.max()) + 1
    # Among tokens that never occurred, those of small ids are the more frequent ones.
    order = counts.double() - torch.arange(len(counts), device=counts.device) / len(counts)
    return order.topk(min(size, len(counts))).indices
