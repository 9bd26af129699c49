"""The generated texts on disk, shard by shard, and the batches that are trained on.

A shard is `NAME.tokens.npy` (int32 [rows, length]), `NAME.kinds.npy` (uint8, what each token
is: see `generation`) and `NAME.json`, which is written last and makes the shard count.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.errors import ModelError, UsageError
from protocol.process.files import PUBLIC, atomic_writer, write_atomically
from services.distill.generation import ANSWER, USER, Integers

Kinds = npt.NDArray[np.uint8]


class RowInfo(msgspec.Struct, frozen=True):
    """What is known of one sequence."""

    group: int
    """Rows of one group (one prompt) are never divided between training and validation."""
    temperature: float
    category: str = ""


class ShardInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a shard."""

    rows: list[RowInfo]
    generated: int
    """Tokens that the target chose."""
    seconds: float
    """What it took to generate them."""


class Texts(NamedTuple):
    """Sequences in memory."""

    tokens: Integers
    """[rows, length]"""
    kinds: Kinds
    """[rows, length]"""
    rows: list[RowInfo]

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Texts":
        """The chosen rows."""
        rows = [row for row, wanted in zip(self.rows, chosen, strict=True) if wanted]
        return Texts(self.tokens[chosen], self.kinds[chosen], rows)


class Batch(NamedTuple):
    """One step's sequences and the positions whose next token is learned."""

    tokens: Integers
    """[batch, length]"""
    positions: Integers
    """[count] flat positions; padded with zeros to a fixed count."""
    weights: npt.NDArray[np.float32]
    """[count] 0 for padding."""
    rows: Integers
    """[batch] which rows of the texts these are."""


class Shards:
    """The folder of a run's shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def infos(self) -> list[ShardInfo]:
        """Descriptions of the complete shards, in order."""
        found: list[ShardInfo] = []
        while (path := self._path(len(found), "json")).is_file():
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=ShardInfo))
            except (OSError, msgspec.DecodeError) as error:
                raise UsageError(f"{str(path)!r} does not describe a shard: {error}") from error
        return found

    def add(self, number: int, tokens: Integers, kinds: Integers, info: ShardInfo) -> None:
        """Write shard `number`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_writer(self._path(number, "tokens.npy"), mode=PUBLIC) as file:
            np.save(file, tokens)
        with atomic_writer(self._path(number, "kinds.npy"), mode=PUBLIC) as file:
            np.save(file, kinds.astype(np.uint8))
        write_atomically(self._path(number, "json"), msgspec.json.encode(info), mode=PUBLIC)

    def read(self) -> Texts:
        """All rows that hold an answer; raises ModelError if there are none."""
        infos = self.infos()
        try:
            tokens = [np.load(self._path(n, "tokens.npy")) for n in range(len(infos))]
            kinds = [np.load(self._path(n, "kinds.npy")) for n in range(len(infos))]
        except (OSError, ValueError) as error:
            raise UsageError(f"a shard in {str(self._folder)!r} is broken: {error}") from error
        rows = [row for info in infos for row in info.rows]
        if not rows:
            raise ModelError("the target generated no text")
        texts = Texts(np.concatenate(tokens), np.concatenate(kinds), rows)
        texts = texts.where((texts.kinds == ANSWER).any(axis=1))
        if not texts.rows:
            raise ModelError("the target generated no answer; allow more data or a longer --length")
        return texts

    def _path(self, number: int, ending: str) -> Path:
        return self._folder / f"shard-{number:05d}.{ending}"


def join_texts(parts: list[Texts]) -> Texts:
    """The texts of several runs; raises UsageError if their sequences differ in length."""
    lengths = {part.tokens.shape[1] for part in parts}
    if len(lengths) > 1:
        raise UsageError(f"the texts have sequences of different --length: {sorted(lengths)}")
    return Texts(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        [row for part in parts for row in part.rows],
    )


def split_texts(texts: Texts, share: float, temperatures: int) -> tuple[Texts, Texts]:
    """Training and validation texts; every `1/share`-th group is held out.

    Invented prompts are groups of one row whose temperatures take turns: whole turns are
    held out together, so that the validation has all temperatures.
    """
    period = round(1 / share)
    held = np.array([row.group // temperatures % period == 0 for row in texts.rows])
    if held.all() or not held.any():
        # Too few texts for shares: the last one is held out, if there is another.
        held = np.arange(len(texts.rows)) == len(texts.rows) - 1
    if held.all():
        raise UsageError("there is only one sequence; raise --data-tokens or --data-minutes")
    return texts.where(~held), texts.where(held)


class Batches:
    """Fixed shapes: every step has as many rows, and as many positions, as the next."""

    def __init__(
        self, texts: Texts, batch: int, *, user_weight: float = 0.0, seed: int = 0
    ) -> None:
        used = int((texts.kinds > 0).any(axis=0).sum())
        # The target's and the drafter's attention get one length, a multiple of 64.
        self._length = min(texts.tokens.shape[1], -(-used // 64) * 64)
        self._tokens = texts.tokens[:, : self._length]
        next_kinds = np.zeros_like(texts.kinds[:, : self._length])
        next_kinds[:, :-1] = texts.kinds[:, 1 : self._length]
        self._weights = (next_kinds == ANSWER) + user_weight * (next_kinds == USER)
        self._batch = batch
        self._seed = seed
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)
        per_row = float((self._weights > 0).sum()) / len(texts.tokens)
        wanted = -(-int(1.1 * per_row * batch + 1) // 128) * 128
        self.count = min(wanted, batch * self._length)
        """Positions per step; a batch with more of them leaves some out, by chance."""

    @property
    def shape(self) -> tuple[int, int]:
        """[batch, length] of each step's tokens."""
        return self._batch, self._length

    @property
    def passes(self) -> int:
        """Batches in which every text comes once."""
        return -(-len(self._tokens) // self._batch)

    def at(self, step: int) -> Batch:
        """The batch of a training step: a function of the step alone."""
        size = len(self._tokens)
        taken = np.arange(step * self._batch, (step + 1) * self._batch)
        rows = np.array(
            [
                self._order(int(epoch))[place]
                for epoch, place in zip(*divmod(taken, size), strict=True)
            ],
            dtype=np.int32,
        )
        return self._of(rows, np.random.default_rng([self._seed, 1, step]))

    def in_order(self, number: int) -> Batch:
        """The `number`-th batch of a single pass; the last is filled up with row 0, unweighted."""
        rows = np.arange(number * self._batch, (number + 1) * self._batch, dtype=np.int32)
        real = rows < len(self._tokens)
        return self._of(np.where(real, rows, 0), np.random.default_rng([self._seed, 2]), real)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._epoch != epoch:
            generator = np.random.default_rng([self._seed, 0, epoch])
            self._epoch, self._permutation = epoch, generator.permutation(len(self._tokens))
        return self._permutation

    def _of(
        self,
        rows: Integers,
        chance: np.random.Generator,
        real: npt.NDArray[np.bool_] | None = None,
    ) -> Batch:
        weights = self._weights[rows].astype(np.float32)
        if real is not None:
            weights *= real[:, None]
        flat = weights.reshape(-1)
        found = np.flatnonzero(flat)
        if len(found) > self.count:
            found = np.sort(chance.choice(found, self.count, replace=False))
        positions = np.zeros(self.count, np.int32)
        positions[: len(found)] = found
        chosen = np.zeros(self.count, np.float32)
        chosen[: len(found)] = flat[found]
        return Batch(self._tokens[rows], positions, chosen, rows)
