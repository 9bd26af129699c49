"""The texts on disk, their division, and the batches made of them."""

from pathlib import Path

import numpy as np
import pytest

from protocol.errors import ModelError, UsageError
from services.distill.batches import Batches
from services.distill.data import RowInfo, ShardInfo, Shards, Texts, split_texts

LENGTH = 70


def texts(count: int, temperatures: int = 4) -> Texts:
    """Row r: two given tokens, two of the user, then r + 1 answer tokens."""
    tokens = np.arange(count * LENGTH, dtype=np.int32).reshape(count, LENGTH)
    kinds = np.zeros((count, LENGTH), np.uint8)
    for row in range(count):
        kinds[row, : 5 + row] = [1, 1, 2, 2] + [3] * (row + 1)
    return Texts(tokens, kinds, [RowInfo(row, row % temperatures / 4) for row in range(count)])


def test_shards_are_kept(tmp_path: Path) -> None:
    """What was added is read again; a shard without its description does not count."""
    whole = texts(6)
    shards = Shards(tmp_path / "data")
    for number, rows in enumerate((slice(0, 4), slice(4, 6))):
        info = ShardInfo(whole.rows[rows], 10, 1.5)
        shards.add(number, whole.tokens[rows], whole.kinds[rows], info)
    np.save(tmp_path / "data" / "shard-00002.tokens.npy", whole.tokens)
    found = shards.read()
    np.testing.assert_array_equal(whole.tokens, found.tokens)
    np.testing.assert_array_equal(whole.kinds, found.kinds)
    assert whole.rows == found.rows
    (tmp_path / "data" / "shard-00001.json").write_text("{")
    with pytest.raises(UsageError, match="shard-00001"):
        shards.infos()


def test_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    """A conversation that never came to its answer teaches nothing."""
    whole = texts(3)
    whole.kinds[1] = 1
    shards = Shards(tmp_path)
    shards.add(0, whole.tokens, whole.kinds, ShardInfo(whole.rows, 10, 1.0))
    assert [row.group for row in shards.read().rows] == [0, 2]
    with pytest.raises(ModelError):
        Shards(tmp_path / "none").read()


def test_validation_has_all_temperatures_and_whole_groups() -> None:
    """Held-out and learned texts share no group; both have every temperature."""
    learned, held = split_texts(texts(64), 0.25, 4)
    groups = [{row.group for row in part.rows} for part in (learned, held)]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == set(range(64))
    assert {row.temperature for row in held.rows} == {0, 0.25, 0.5, 0.75}
    assert len(held.rows) == 16
    assert [len(part.rows) for part in split_texts(texts(3), 0.2, 4)] == [2, 1]
    with pytest.raises(UsageError):
        split_texts(texts(1), 0.2, 4)


def test_positions_are_those_before_an_answer_token() -> None:
    """Position t is learned if token t + 1 belongs to the answer; users' tokens weigh less."""
    whole = texts(3)
    batch = Batches(whole, 3, user_weight=0.25).in_order(0)
    flat = whole.kinds[:, :64].reshape(-1)
    real = batch.weights > 0
    assert (flat[batch.positions[real] + 1] == np.where(batch.weights[real] == 1, 3, 2)).all()
    assert real.sum() == (flat == 3).sum() + (flat == 2).sum()
    answers_only = Batches(whole, 3).in_order(0)
    assert (answers_only.weights > 0).sum() == (flat == 3).sum()


def test_batches_are_functions_of_the_step() -> None:
    """Same step, same batch, whatever was asked before; an epoch holds every row once."""
    whole = texts(9)
    one, other = Batches(whole, 3, seed=5), Batches(whole, 3, seed=5)
    later = one.at(7)
    for step in range(8):
        batch = other.at(step)
        assert batch.tokens.shape == (3, 64)
        assert batch.positions.shape == batch.weights.shape
    np.testing.assert_array_equal(later.positions, batch.positions)
    np.testing.assert_array_equal(later.tokens, batch.tokens)
    assert one.steps == 3
    assert sorted(row for step in range(3) for row in one.at(step).rows) == list(range(9))
    orders = [
        [int(row) for step in steps for row in one.at(step).rows]
        for steps in ((0, 1, 2), (3, 4, 5))
    ]
    assert orders[0] != orders[1]


def test_short_texts_stand_together() -> None:
    """A step has as many tokens whatever its length; no answer token is cut off."""
    lengths = [40] * 37 + [100] * 20 + [200] * 9 + [250] * 3
    kinds = np.zeros((len(lengths), 256), np.uint8)
    for row, length in enumerate(lengths):
        kinds[row, :2], kinds[row, 2:length] = 1, 3
    rows = [RowInfo(row, 0.0) for row in range(len(lengths))]
    tokens = np.broadcast_to(np.arange(256, dtype=np.int32), kinds.shape)
    batches = Batches(Texts(tokens, kinds, rows), 4, seed=1)
    shapes, learned = set(), dict[int, int]()
    for step in range(batches.steps):
        batch = batches.at(step)
        shapes.add(batch.tokens.shape)
        for place, row in enumerate(batch.rows):
            first, last = place * batch.tokens.shape[1], (place + 1) * batch.tokens.shape[1]
            here = (batch.positions >= first) & (batch.positions < last)
            learned[int(row)] = int(batch.weights[here].sum())
    assert shapes == {(16, 64), (8, 128), (4, 256)}
    assert learned == {row: length - 2 for row, length in enumerate(lengths)}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_texts_are_one_batch(count: int) -> None:
    """Fewer texts than a batch has rows: some come twice."""
    batches = Batches(texts(60).where(np.arange(60) >= 60 - count), 8)
    assert batches.steps == 1
    assert set(batches.at(0).rows) == set(range(count))


def test_a_full_batch_leaves_some_positions_out() -> None:
    """More learnable positions than a step has room for: a random choice, each once."""
    whole = texts(60)
    uneven = whole.where((np.arange(60) < 24) | (np.arange(60) >= 52))
    batches = Batches(uneven, 4)
    crowded = max((batches.at(step) for step in range(80)), key=lambda b: int(b.weights.sum()))
    chosen = crowded.positions[crowded.weights > 0]
    assert len(set(chosen.tolist())) == len(chosen) == len(crowded.positions)


def test_the_last_batch_of_a_pass_counts_nothing_twice() -> None:
    """5 rows in batches of 3: the filling row has no weight."""
    whole = texts(5)
    batches = Batches(whole, 3)
    assert batches.passes == 2
    total = sum(int((batches.in_order(n).weights > 0).sum()) for n in range(2))
    assert total == int((whole.kinds == 3).sum())
