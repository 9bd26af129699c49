"""The generated texts on disk, shard by shard.

A shard is `NAME.tokens.npy` (int32 [rows, length]), `NAME.kinds.npy` (uint8, the kind of each
token) and `NAME.json`, which is written last and makes the shard valid.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.errors import ModelError, UsageError
from protocol.process.files import PUBLIC, atomic_writer, write_atomically

Integers = npt.NDArray[np.int32]
Kinds = npt.NDArray[np.uint8]

PADDING, GIVEN, USER, ANSWER = range(4)
"""Kinds of tokens in a sequence."""


class RowInfo(msgspec.Struct, frozen=True):
    """Description of one sequence."""

    group: int
    """Rows of one group (one prompt) are never divided between training and validation."""
    temperature: float
    category: str = ""


class ShardInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a shard."""

    rows: list[RowInfo]
    generated: int
    """Number of tokens that the target chose."""
    seconds: float
    """Time to generate them."""


class Texts(NamedTuple):
    """Sequences in memory."""

    tokens: Integers
    """[rows, length]"""
    kinds: Kinds
    """[rows, length]"""
    rows: list[RowInfo]

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Texts":
        """Return the chosen rows."""
        rows = [row for row, wanted in zip(self.rows, chosen, strict=True) if wanted]
        return Texts(self.tokens[chosen], self.kinds[chosen], rows)


class Shards:
    """The folder of a run's shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def infos(self) -> list[ShardInfo]:
        """Descriptions of the complete shards, in order."""
        infos: list[ShardInfo] = []
        while (path := self._path(len(infos), "json")).is_file():
            try:
                infos.append(msgspec.json.decode(path.read_bytes(), type=ShardInfo))
            except (OSError, msgspec.DecodeError) as error:
                raise UsageError(f"{str(path)!r} does not describe a shard: {error}") from error
        return infos

    def add(self, number: int, tokens: Integers, kinds: Integers, info: ShardInfo) -> None:
        """Write shard `number`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_writer(self._path(number, "tokens.npy"), mode=PUBLIC) as file:
            np.save(file, tokens)
        with atomic_writer(self._path(number, "kinds.npy"), mode=PUBLIC) as file:
            np.save(file, kinds.astype(np.uint8))
        write_atomically(self._path(number, "json"), msgspec.json.encode(info), mode=PUBLIC)

    def read(self) -> Texts:
        """Return all rows that hold an answer; raises ModelError if there are none."""
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
            raise ModelError("the target generated no answer; allow more data or a longer length")
        return texts

    def _path(self, number: int, ending: str) -> Path:
        return self._folder / f"shard-{number:05d}.{ending}"


def join_texts(parts: list[Texts]) -> Texts:
    """Join the texts of several runs; raises UsageError if their sequences differ in length."""
    lengths = {part.tokens.shape[1] for part in parts}
    if len(lengths) > 1:
        raise UsageError(f"the texts have sequences of different length: {sorted(lengths)}")
    return Texts(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        [row for part in parts for row in part.rows],
    )


def split_texts(texts: Texts, share: float, temperatures: int) -> tuple[Texts, Texts]:
    """Split into training and validation texts; every `1/share`-th group is held out.

    Invented prompts are groups of one row whose temperatures rotate: whole rotations are held out
    together, so that the validation has all temperatures.
    """
    period = round(1 / share)
    held = np.array([row.group // temperatures % period == 0 for row in texts.rows])
    if held.all() or not held.any():
        # Too few texts for shares: the last one is held out, if there is another.
        held = np.arange(len(texts.rows)) == len(texts.rows) - 1
    if held.all():
        raise UsageError("there is only one sequence; raise data_tokens or data_minutes")
    return texts.where(~held), texts.where(held)
