"""What is read from a file is the model's own, or is refused."""

from typing import Any

import mlx.core as mx
import pytest

from services.kv.dump_check import Dump, check_dump, sample_dumps
from services.kv.prefix_cache_file import _UNUSABLE
from services.kv.rewinding import find_rewinding
from services.mlx.loader import load
from tests.support.families.layered import LAYERED
from tests.support.reference import tiny_folder
from tests.support.tiny_models import FAMILIES, write_tiny_model


def dump_of(module: Any, make: Any, tokens: int) -> Dump:
    """Of a sequence with a checkpoint in it."""
    state = make()
    for count in (tokens // 2, tokens - tokens // 2):
        state.append(count, whole=True)
        module(mx.ones((1, count), mx.int32), cache=state.caches)
        state.commit(state.length)
        state.checkpoint()
    return dict(state.dump(state.length))


@pytest.mark.parametrize("family", [*FAMILIES, *LAYERED])
def test_a_models_own_states_are_taken(family: str) -> None:
    """Of any length."""
    module = load(tiny_folder(family)).module
    make = find_rewinding(module, bucketed=False).make
    samples = sample_dumps(module, make)
    for tokens in (7, 261):
        check_dump(dump_of(module, make, tokens), samples)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "falcon_h1", "jamba", "rwkv7"])
def test_each_array_must_have_its_shape(family: str, tmp_path: Any) -> None:
    """And its format; of one that is missing, and of other layers, it is the same."""
    module = load(tiny_folder(family)).module
    make = find_rewinding(module, bucketed=False).make
    samples = sample_dumps(module, make)
    dump = dump_of(module, make, 20)
    for name, array in [item for item in dump.items() if item[0] != "points"]:
        wrong = [dump | {name: mx.repeat(array, 2, axis=-1)}, dump | {name: array[None]}]
        wrong += [dump | {name: array.astype(mx.float16)}]
        wrong += [{key: value for key, value in dump.items() if key != name}]
        for other in wrong:
            with pytest.raises(_UNUSABLE):
                check_dump(other, samples)
    more = load(write_tiny_model(tmp_path / "more", family, layers=6)).module
    made = find_rewinding(more, bucketed=False).make
    with pytest.raises(ValueError, match=r"holds .* not"):
        check_dump(dump_of(more, made, 20), samples)
