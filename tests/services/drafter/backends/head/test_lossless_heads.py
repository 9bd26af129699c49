"""Whatever a head is sent of the target's states, and when: the answer is plain decoding's.

Target and drafter work in turns here, so what is drafted depends on no clock.
"""

import json
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from orchestrator.sequence.limits import Limits
from protocol.messages import Features, Sampling, Statistics
from services.drafter.backends.base import DraftBackend
from services.drafter.backends.head.loading import load_head
from services.mlx.loader import load
from services.verifier.verifier import Verifier
from tests.services.drafter.lookup_backend import LookupBackend
from tests.support.head_reference import Tensors
from tests.support.lockstep import Lockstep
from tests.support.reference import load_target, plain, tiny_folder
from tests.support.tiny_models import vocabulary_size
from tests.support.write_heads import WIDTH, dflash, eagle3, mtp, write_head

PROMPT = (0, *[97, 41, 250, 33, 8] * 3, 19, 203, 64)
LENGTH = 20
NODES = 6
BRANCHES = 8
"""So few that the rounds of all are planned beforehand."""
FORMATS = {
    "eagle3": "llama",
    "mtp": "qwen3_5",
    "dflash": "qwen3",
    "dflash2": "qwen3",
    "dspark": "qwen3",
}
"""And the family of the target."""
SAMPLINGS = {"greedy": Sampling(), "T0.7": Sampling(temperature=0.7, seed=5)}


@cache
def verifier_of(family: str) -> Verifier:
    return Verifier(load_target(tiny_folder(family)), 512)


@pytest.fixture(scope="module", params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def head(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a head of this format, with random weights."""
    folder = tmp_path_factory.mktemp("heads") / name
    if name == "eagle3":
        return write_head(folder, *eagle3(vocabulary_size(), layers=[1, 2, 3], trimmed=100))
    if name == "mtp":
        return write_head(folder, target_config(name), mtp())
    return write_head(folder, *dflash(vocabulary_size(), name, layers=[0, 2], count=3))


def target_config(name: str) -> dict[str, Any]:
    """MTP comes with its target, and has no config of its own."""
    config: dict[str, Any] = json.loads((tiny_folder(FORMATS[name]) / "config.json").read_bytes())
    return config


# ---------------------------------------------------------------- what reaches the head

Deliver = Callable[[Features], list[Features]]


def at_once(message: Features) -> list[Features]:
    return [message]


def never(message: Features) -> list[Features]:
    """A verifier or a host that knows no features."""
    del message
    return []


def prompt_only(message: Features) -> list[Features]:
    return [message] if message.first < len(PROMPT) - 1 else []


def end_only(message: Features) -> list[Features]:
    """A verifier that did not keep the beginning."""
    return [message] if message.first > len(PROMPT) + 5 else []


def a_round_late() -> Deliver:
    held: list[Features] = []

    def deliver(message: Features) -> list[Features]:
        held.append(message)
        return held[-2:-1]

    return deliver


def foreign(message: Features) -> list[Features]:
    """As of another target, or for another head: of the right size, and wrong."""
    count = len(message.data) // 2
    numbers = np.random.default_rng(message.first).standard_normal(count)
    return [replace(message, data=numbers.astype(np.float16).tobytes())]


def of_another_width(message: Features) -> list[Features]:
    return [replace(message, data=message.data[: len(message.data) // 2])]


DELIVERIES: dict[str, Callable[[], Deliver]] = {
    "at once": lambda: at_once,
    "never": lambda: never,
    "prompt only": lambda: prompt_only,
    "end only": lambda: end_only,
    "a round late": a_round_late,
    "foreign": lambda: foreign,
    "of another width": lambda: of_another_width,
}


def start(
    name: str, head: Path, sampling: Sampling, deliver: Deliver, nodes: int = NODES
) -> Lockstep:
    return Lockstep(
        verifier_of(FORMATS[name]),
        new_head(name, head),
        list(PROMPT),
        Limits(LENGTH, frozenset(), 0),
        num_draft_tokens=3,
        sampling=sampling,
        tree_nodes=nodes,
        branches=BRANCHES,
        deliver=deliver,
    )


def new_head(name: str, head: Path) -> DraftBackend:
    backend: Any = load_head(head, tiny_folder(FORMATS[name]), 5, beside_target=True)
    return backend


def finish(name: str, line: Lockstep, sampling: Sampling) -> Statistics:
    """To the end; the answer is checked, and that there were drafts."""
    statistics = line.run()
    assert line.sequence.tokens[len(PROMPT) :] == plain(FORMATS[name], PROMPT, LENGTH, sampling)
    assert statistics.drafted > 0
    return statistics


@pytest.mark.parametrize(("delivery", "law"), list(zip(DELIVERIES, cycle(SAMPLINGS), strict=False)))
def test_missing_and_wrong_states_change_no_token(
    name: str, head: Path, delivery: str, law: str
) -> None:
    """Late, in part, twice, of another model, or never; with trees, where the target takes any."""
    line = start(name, head, SAMPLINGS[law], DELIVERIES[delivery]())
    statistics = finish(name, line, SAMPLINGS[law])
    assert bool(statistics.tree_rounds) == verifier_of(FORMATS[name]).takes_trees


@pytest.mark.parametrize("nodes", [0, 12], ids=["chains", "trees"])
@pytest.mark.wide
def test_trees_of_any_size_change_no_token(name: str, head: Path, nodes: int) -> None:
    """With filters, and a temperature of the drafter's own."""
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=20, seed=3, draft_temperature=0.5)
    statistics = finish(name, start(name, head, sampling, at_once, nodes), sampling)
    assert nodes or not statistics.tree_rounds


def test_a_head_that_is_swapped_in_again_changes_no_token(name: str, head: Path) -> None:
    """It is sent the states of all that is committed, and goes on from there."""
    sampling = SAMPLINGS["T0.7"]
    line = start(name, head, sampling, at_once)

    def swap(rounds: int) -> None:
        if rounds in {3, 6}:
            line.swap(LookupBackend() if rounds == 3 else new_head(name, head))

    line.run(swap)
    assert line.sequence.tokens[len(PROMPT) :] == plain(FORMATS[name], PROMPT, LENGTH, sampling)


# ---------------------------------------------------------------- what the states are worth


def write_echo(folder: Path, name: str) -> Path:
    """A head that drafts what the last state says, and nothing without states: no layer of its
    own, and the target's last layer in the place of the projection."""
    target: Any = load(tiny_folder(FORMATS[name])).module
    text = getattr(target, "language_model", target)
    if name == "eagle3":
        config, tensors = eagle3(vocabulary_size(), layers=[1, 2, 3])
        tensors["lm_head.weight"] = numbers(text.model.embed_tokens.weight)
        tensors["norm.weight"] = numbers(text.model.norm.weight)
        tensors["fc.weight"] = np.concatenate([np.zeros((WIDTH, 2 * WIDTH)), np.eye(WIDTH)], axis=1)
    else:
        config, tensors = target_config(name), mtp()
        tensors["mtp.fc.weight"] = np.concatenate([np.zeros((WIDTH, WIDTH)), np.eye(WIDTH)], axis=1)
        for norm in ("mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"):
            tensors[norm] = np.zeros(WIDTH)  # they are stored less one
    silence(tensors)
    return write_head(folder, config, tensors)


def numbers(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def silence(tensors: Tensors) -> None:
    """Have the layer add nothing."""
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])


@pytest.mark.wide
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_missing_states_make_drafts_worse(name: str, tmp_path: Path) -> None:
    """A head that knows nothing but the states: the more there are, the more is accepted."""
    echo = write_echo(tmp_path / name, name)
    accepted = {}
    for delivery in ("at once", "prompt only", "end only", "never"):
        line = start(name, echo, Sampling(), DELIVERIES[delivery](), 0)
        accepted[delivery] = finish(name, line, Sampling()).accepted
    assert accepted["never"] == 0
    assert accepted["at once"] > accepted["prompt only"]
    assert accepted["at once"] >= accepted["end only"] > 0
