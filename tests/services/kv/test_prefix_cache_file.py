"""The target's prompt cache in a file: whole and of this model, or as good as none."""

import stat
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launch.settings.settings import StackSettings
from protocol.decoding.token_tree import read_tree
from protocol.messages import CloseSequence, OpenSequence, Prefilled, Sampling
from services.engine.target_model import TargetModel
from services.kv.prefix_cache import PrefixCache
from services.kv.prefix_cache_file import identify_kv, load, save
from services.mlx.loader import LoadedModel
from services.mlx.loader import load as load_model
from services.verifier.verifier import Verifier
from tests.support.reference import prepare_shared, said
from tests.support.stack import running
from tests.support.tiny_models import write_tiny_model

MUCH = 2**40
PROMPT = list(range(40, 90))


@cache
def model_of(folder: Path) -> tuple[LoadedModel, TargetModel | None]:
    model = load_model(folder)
    return model, prepare_shared(model.module)


class Kept:
    """A verifier and its prompt cache, which know one folder's model."""

    def __init__(self, folder: Path) -> None:
        self.prompts = PrefixCache(10, MUCH)
        model, target = model_of(folder)
        self.module = model.module
        self.verifier = Verifier(model, 512, self.prompts, target)
        self.identity = identify_kv(model, "mlx")

    def open(self) -> int:
        """How much of the prompt it knew."""
        asked = OpenSequence(sequence=1, tokens=PROMPT, sampling=Sampling())
        [opened] = said(self.verifier.handle(asked))
        assert isinstance(opened, Prefilled)
        list(self.verifier.handle(CloseSequence(sequence=1)))
        return opened.cached

    def read(self, file: Path) -> None:
        load(file, self.prompts, self.identity, self.module, self.verifier.new_state)


WIDER: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "gemma3": {"head_dim": 32},
    "qwen3_next": {"linear_value_head_dim": 32},
    "lfm2": {"conv_L_cache": 4},
    "mamba2": {"state_size": 32},
}
"""What is remembered in other shapes: slots, windows, delta nets, convolutions, Mamba-2."""


class Target(NamedTuple):
    """A model and its family."""

    family: str
    folder: Path


@pytest.fixture(scope="module", params=WIDER)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    family: str = request.param
    return Target(family, write_tiny_model(tmp_path_factory.mktemp("model") / "m", family, seed=1))


@pytest.fixture(scope="module")
def folder(target: Target) -> Path:
    return target.folder


@pytest.fixture(scope="module")
def wider(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the family, with states of other shapes."""
    place = tmp_path_factory.mktemp("wider") / "m"
    return write_tiny_model(place, target.family, seed=2, config=WIDER[target.family])


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    """What a process that answered one prompt leaves."""
    first, path = Kept(folder), tmp_path / "prompts"
    assert first.open() == 0
    save(path, first.prompts, first.identity)
    return path


def test_what_was_saved_is_known(folder: Path, file: Path) -> None:
    """All of it, in the same bits; it is nobody else's to read, and nothing lies beside it."""
    first, second = Kept(folder), Kept(folder)
    first.open()
    second.read(file)
    [kept], [old] = second.prompts.kept, first.prompts.kept
    assert kept.tokens == old.tokens == PROMPT
    ours, theirs = kept.state.dump(50), old.state.dump(50)
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert second.open() == len(PROMPT)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty", "folder"])
def test_a_damaged_file_is_as_good_as_none(
    folder: Path, file: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs a line in the log."""
    whole = file.read_bytes()
    file.unlink()
    match damage:
        case "cut":
            file.write_bytes(whole[:-1000])
        case "flipped":
            at = len(whole) - 2000
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        case "foreign":
            file.write_bytes(b"PK\x03\x04 is no safetensors file, but an archive" * 9)
        case "empty":
            file.write_bytes(b"")
        case _:
            file.mkdir()
    second = Kept(folder)
    second.read(file)
    assert len(second.prompts) == 0
    assert "is not used" in caplog.text
    assert second.open() == 0


def test_another_models_file_is_not_used(
    target: Target, wider: Path, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor are the same weights' states if they were computed in another way."""
    for place in (wider, write_tiny_model(tmp_path / "other", target.family, seed=2)):
        other = Kept(place)
        caplog.clear()
        other.read(file)
        assert len(other.prompts) == 0
        assert "another model" in caplog.text
        assert other.open() == 0
    same = load_model(target.folder)
    assert identify_kv(same, "mlx") == Kept(target.folder).identity != identify_kv(same, "coreml")


def test_states_of_other_shapes_are_not_used(
    folder: Path, wider: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the file says of the model that it is of: nothing goes on with them."""
    other = Kept(wider)
    other.identity = Kept(folder).identity
    other.read(file)
    assert len(other.prompts) == 0
    assert "is not used" in caplog.text
    assert "has the shape" in caplog.text
    assert other.open() == 0


def test_what_a_killed_process_left_goes(folder: Path, file: Path) -> None:
    """But not what a living one writes just now."""
    dead = file.with_name(f".{file.name}.{2**30}.x.tmp")
    living = file.with_name(f".{file.name}.1.x.tmp")
    for path in (dead, living):
        path.write_bytes(b"half")
    Kept(folder).read(file)
    assert not dead.exists()
    assert living.exists()


def test_a_full_disk_costs_a_line(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here: a folder that is not there."""
    first = Kept(folder)
    first.open()
    save(tmp_path / "nowhere" / "prompts", first.prompts, first.identity)
    assert "was not saved" in caplog.text


def test_a_sequence_that_is_cut_off_is_kept_as_far_as_it_is_sure(
    folder: Path, tmp_path: Path
) -> None:
    """In the middle of a pass the store has room for tokens that nobody has accepted."""
    first, second, path = Kept(folder), Kept(folder), tmp_path / "prompts"
    asked = OpenSequence(sequence=1, tokens=PROMPT, sampling=Sampling())
    list(first.verifier.handle(asked))
    [(_, sequence)] = first.verifier._sequences.items()
    sequence.state.append_tree(read_tree([1] * 7, []))
    first.verifier.retire_all()
    save(path, first.prompts, first.identity)
    second.read(path)
    [kept] = second.prompts.kept
    assert (kept.tokens, kept.state.length) == (PROMPT, len(PROMPT))


@pytest.mark.processes
@pytest.mark.usefixtures("run_dir")
def test_a_second_stack_knows_the_firsts_prompts(tmp_path: Path) -> None:
    """It says how much it did not compute, and answers with the same tokens."""
    target, draft = (
        write_tiny_model(tmp_path / name, "llama", seed=1, noise=noise)
        for name, noise in (("target", 0.0), ("draft", 0.3))
    )
    file = tmp_path / "prompts.safetensors"
    settings = StackSettings(model=str(target), draft_model=str(draft), prompt_cache_file=str(file))
    answers = []
    for _ in range(2):
        with running(settings) as stack:
            answers.append(stack.answer("", tokens=PROMPT))
    first, second = answers
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(PROMPT) - 1
    assert second.tokens == first.tokens
    assert [path.name for path in tmp_path.glob("prompts*")] == [file.name]
