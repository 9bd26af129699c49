"""What a pass takes is reckoned before it begins, and what does not fit is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.token_tree import read_tree
from protocol.errors import OutOfMemory
from protocol.messages import OpenSequence, Prefilled, Sampling, VerificationOutcome, Verify
from protocol.process.free_memory import FreeMemory
from services.drafter.backends.mlx import MlxBackend
from services.engine import pass_memory, target_model
from services.engine.batch import round_to_bucket
from services.engine.pass_memory import PassMemory
from services.engine.target_model import prepare
from services.kernels.register import KERNELS
from services.kv import budget
from services.kv.budget import KVSize, count_kv_tokens, measure_kv
from services.kv.prefix_cache import PrefixCache
from services.kv.replay import size_pass
from services.mlx.fused_linear import fuse_linears
from services.mlx.loader import LoadedModel, load
from services.verifier.verifier import Verifier
from tests.support.tiny_models import FAMILIES, write_tiny_model

MB = 1 << 20
LIMIT = "the limit of this test"
STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"linear_num_value_heads": 16, "linear_num_key_heads": 16}
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    "mamba2": {"num_heads": 32, "head_dim": 64, "state_size": 128, "intermediate_size": 2048},
    "jamba": {"mamba_d_state": 256},
    "gpt_oss": {"sliding_window": 512, "head_dim": 128},
}
"""Models whose states are larger than all that is computed beside them."""
TAKEN_ON_CUDA = {96: 12.80, 160: 17.41, 512: 53.44, 1024: 107.38}
"""MB that a pass of so many tokens of `model` took on an H100 (2026-11-23)."""
HEADS = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 4096}


class Free:
    """Memory that is left, as the test wants it."""

    def __init__(self) -> None:
        self.bytes = 1 << 50
        self.asked = 0

    def __call__(self) -> FreeMemory:
        self.asked += 1
        return FreeMemory(self.bytes, LIMIT)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    found = Free()
    monkeypatch.setattr(pass_memory, "free_for_mlx", found)
    monkeypatch.setattr(budget, "free_for_mlx", found)
    return found


@pytest.fixture
def mlx_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MLX compute all passes: it does not count what the C program for CPUs takes."""
    monkeypatch.setattr(target_model, "equip", lambda _module: False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return load(write_tiny_model(folder, "llama", config=HEADS))


@pytest.mark.usefixtures("mlx_passes")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_takes_no_more_than_is_reckoned(tmp_path: Path, family: str, free: Free) -> None:
    """MLX's own count of the highest memory of a pass is below what was asked for."""
    target, memory, state = prepared(tmp_path, family)
    for rows in (96, 160):
        free.bytes, free.asked = 1 << 50, 0
        taken = take(target, state, rows)
        state = target.states.make()
        free.bytes = pass_memory._RESERVE + taken  # the reserve is for what MLX does not count
        with pytest.raises(OutOfMemory, match=LIMIT):
            memory.check([(state, rows)])


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("qwen3_next", 4),
        ("mamba2", 4),
        ("mamba2", 20),
        ("jamba", 4),
        ("qwen3_next", 96),
        ("jamba", 96),
        ("gpt_oss", 96),
    ],
)
def test_a_pass_takes_no_more_for_its_states_than_is_reckoned(
    tmp_path: Path, family: str, rows: int, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded of a draft until it is judged is a part of that; so are checkpoints."""
    monkeypatch.setattr(pass_memory, "_FEW_BYTES", 0)
    drafts = rows < 64
    target, memory, state = prepared(tmp_path, family, drafts=drafts)
    take(target, state, 66)
    state.checkpoint()
    before = state.fork(state.length)
    taken = take(target, state, rows, whole=not drafts)
    mx.clear_cache()
    free.bytes = pass_memory._RESERVE + taken
    with pytest.raises(OutOfMemory, match=LIMIT):
        memory.check([(before, rows)])


@pytest.mark.parametrize(("rows", "taken"), [(64, 537.4), (96, 775.9), (160, 1604.4)])
def test_states_of_all_layers_are_reckoned_on_cuda(
    tmp_path: Path, rows: int, taken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a recurrence that nothing is known of: MB that a pass of jamba's took on an H200."""
    target, _, state = prepared(tmp_path, "jamba")
    kv = measure_kv(target.verify, target.states.make)
    size = size_pass([kv.passes.states // 2] * 2, None)
    monkeypatch.setattr(pass_memory, "kernels", lambda: KERNELS["cuda"])
    memory = PassMemory(target.verify, kv._replace(passes=size), lambda: False, logits=False)
    reckoned = memory._count_bytes([(state, rows)]) - pass_memory._RESERVE
    assert taken * 1e6 < reckoned < 2.5 * taken * 1e6


def test_windows_hold_no_more_than_is_reckoned(tmp_path: Path) -> None:
    """They have room for the chunks of a prompt that go through them."""
    target, _, state = prepared(tmp_path, "gpt_oss")
    kv = measure_kv(target.verify, target.states.make)
    for _ in range(5):
        take(target, state, 200)
        slots = round_to_bucket(state.length) * kv.per_token
        assert state.nbytes - slots <= kv.fixed


def test_a_draft_that_does_not_fit_fails_alone(
    tmp_path: Path, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of its rows are too many; the next request is answered."""
    monkeypatch.setattr(pass_memory, "_FEW_BYTES", 0)
    folder = write_tiny_model(tmp_path / "model", "mamba2", config=STATES["mamba2"])
    verifier = Verifier(load(folder), 64)
    list(verifier.handle(opening(20)))
    mx.clear_cache()
    free.bytes = pass_memory._RESERVE + 10 * MB
    draft = Verify(sequence=1, round=1, position=20, nodes=[5, 6, 7, 8])
    with pytest.raises(OutOfMemory, match=f"a pass over 4 tokens needs .* {LIMIT} leaves"):
        list(verifier.handle(draft))
    free.bytes = 1 << 50
    list(verifier.handle(opening(20)))
    assert any(isinstance(answer, VerificationOutcome) for answer in verifier.handle(draft))


def test_branches_that_do_not_fit_are_not_grown(
    tmp_path: Path, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has states of its own."""
    monkeypatch.setattr(pass_memory, "_FEW_BYTES", 0)
    folder = write_tiny_model(tmp_path / "model", "mamba2", config=STATES["mamba2"])
    drafter = MlxBackend(folder, 64)
    list(drafter.open(1, [5] * 20, Sampling()))
    mx.clear_cache()
    # More is held on CUDA: the two tokens before the branches take 90 MB there, not 29.
    free.bytes = pass_memory._RESERVE + (110 if mx.cuda.is_available() else 60) * MB
    with pytest.raises(OutOfMemory, match=f"a pass over 16 tokens needs .* {LIMIT} leaves"):
        list(drafter.prepare(1, read_tree([7, 8]), [8, 8], 2))


def test_what_parts_of_a_long_attention_find_is_reckoned(
    model: LoadedModel, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, of all layers, until they are merged; behind a short text there is one part."""
    monkeypatch.setattr(pass_memory, "kernels", lambda: KERNELS["cuda"])
    monkeypatch.setattr(pass_memory, "_FEW_BYTES", 0)
    mx.clear_cache()
    memory = PassMemory(model.module, KVSize(1, 0), lambda: False, logits=True)
    free.bytes = pass_memory._RESERVE
    memory.check([(SimpleNamespace(length=500), 4)])
    with pytest.raises(OutOfMemory, match=LIMIT):
        memory.check([(SimpleNamespace(length=8000), 4)])
    one, other = SimpleNamespace(length=8000), SimpleNamespace(length=8000)
    passes = [(one, 4)], [(one, 40)], [(one, 1), (other, 3)], [(one, 20), (other, 20)]
    passes += ([(one, 40), (other, 40)],)
    needed = [memory._count_bytes(asked) for asked in passes]
    memory._part_bytes = 0
    attention = model.module.layers[0].self_attn
    row = 16 * 4 * len(model.module.layers) * attention.n_heads * (attention.head_dim + 2)
    # More rows are for MLX's attention, which has no parts; those of a table are filled up.
    rest = [memory._count_bytes(asked) for asked in passes]
    assert np.subtract(needed, rest).tolist() == [4 * row, 0, 4 * row, 64 * row, 0]


def test_joined_products_have_as_many_queries(tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path / "llama", "llama", config=HEADS)).module
    attention = model.layers[0].self_attn
    numbers = attention.n_heads * (attention.head_dim + 2)
    assert pass_memory._count_queries(model) == numbers
    assert fuse_linears(model)
    assert pass_memory._count_queries(model) == numbers


@pytest.mark.usefixtures("mlx_passes")
def test_the_reckoning_is_of_the_right_size(tmp_path: Path, free: Free) -> None:
    """Ten times of what a pass takes are enough: chunks are not shortened without need."""
    module = load(write_tiny_model(tmp_path, "llama", config=HEADS)).module
    target = prepare(module)
    kv = measure_kv(module, target.states.make)
    memory = PassMemory(module, kv, lambda: False, logits=False)
    taken = take(target, target.states.make(), 512)
    free.bytes = pass_memory._RESERVE + 10 * taken
    memory.check([(target.states.make(), 512)])


@pytest.mark.parametrize("rows", TAKEN_ON_CUDA)
def test_what_all_layers_compute_is_reckoned_on_cuda(
    model: LoadedModel, free: Free, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX keeps it until the kernels are done: at least as much as was measured, not much more."""
    monkeypatch.setattr(pass_memory, "kernels", lambda: KERNELS["cuda"])
    target = prepare(model.module)
    kv = measure_kv(model.module, target.states.make)
    memory = PassMemory(model.module, kv, lambda: False, logits=True)
    taken = round(TAKEN_ON_CUDA[rows] * MB)
    free.bytes = pass_memory._RESERVE + taken
    with pytest.raises(OutOfMemory, match=LIMIT):
        memory.check([(target.states.make(), rows)])
    free.bytes = pass_memory._RESERVE + 2 * taken
    memory.check([(target.states.make(), rows)])


def test_whole_pieces_of_memory_are_reckoned_on_cuda(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model's arrays are smaller than what MLX takes for them there."""
    target = prepare(model.module)
    kv, state = measure_kv(model.module, target.states.make), target.states.make()
    needed = []
    for unit in ("cpu", "cuda"):
        monkeypatch.setattr(pass_memory, "kernels", lambda unit=unit: KERNELS[unit])
        memory = PassMemory(model.module, kv, lambda: False, logits=False)
        needed.append(memory._count_bytes([(state, 1)]))
    assert needed[1] - needed[0] > len(model.module.layers) * MB


@pytest.mark.parametrize(("unit", "slots"), [("cpu", 1280), ("cuda", 1536)])
def test_buffers_that_a_replay_widens_are_reckoned(
    model: LoadedModel, free: Free, monkeypatch: pytest.MonkeyPatch, unit: str, slots: int
) -> None:
    """On a GPU they come in fewer sizes."""
    target = prepare(model.module)
    kv = measure_kv(model.module, target.states.make)
    monkeypatch.setattr(pass_memory, "kernels", lambda: KERNELS[unit])
    memory = PassMemory(model.module, kv, lambda: False, logits=False)
    free.bytes = slots * kv.per_token + 2 * kv.fixed + pass_memory._RESERVE
    memory.check_prompt(0, 1100)
    free.bytes -= 1
    with pytest.raises(OutOfMemory, match="a prompt of 1100 tokens"):
        memory.check_prompt(0, 1100)


def test_a_chunk_is_shortened_before_it_is_refused(model: LoadedModel, free: Free) -> None:
    """Down to what fits, or to the least that makes sense."""
    target = prepare(model.module)
    kv = measure_kv(model.module, target.states.make)
    memory = PassMemory(model.module, kv, lambda: False, logits=False)
    state = target.states.make()
    assert memory.fit(state, 512, least=16) == 512
    free.bytes = memory._count_bytes([(state, 512)]) - 1
    shortened = memory.fit(state, 512, least=16)
    assert 16 < shortened < 512
    with pytest.raises(OutOfMemory):
        memory.check([(state, 512)])
    free.bytes = pass_memory._RESERVE
    with pytest.raises(OutOfMemory):
        memory.fit(state, 512, least=16)


def test_kept_prefixes_give_way(model: LoadedModel, free: Free) -> None:
    """What may be computed again is dropped, one after the other, until a pass fits."""
    left = [3]

    def release() -> bool:
        left[0] -= 1
        free.bytes += 100 * MB
        return left[0] >= 0

    memory = PassMemory(model.module, KVSize(1, 0), release, logits=False)
    free.bytes = pass_memory._RESERVE - 150 * MB
    memory.check_prompt(0, 100)
    assert left == [1]


def test_small_passes_are_not_reckoned(model: LoadedModel, free: Free) -> None:
    """A verification that fits into the buffers costs no look at the system."""
    target = prepare(model.module)
    kv = measure_kv(model.module, target.states.make)
    memory = PassMemory(model.module, kv, lambda: False, logits=True)
    state = target.states.make()
    take(target, state, 10)
    memory.check([(state, 5)])
    assert free.asked == 0
    memory.check([(state, 250)])
    assert free.asked > 0


def test_a_prompt_that_does_not_fit_ends_alone(tmp_path: Path, free: Free) -> None:
    """It is refused with a sentence that names the limit; the next one is served."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    model = load(write_tiny_model(tmp_path, "llama", config=HEADS | heads))
    verifier = Verifier(model, 64, PrefixCache(4, 1 << 30))
    kv = measure_kv(model.module, prepare(model.module).states.make)
    free.bytes = pass_memory._RESERVE + 4000 * kv.per_token
    with pytest.raises(OutOfMemory, match=f"a prompt of 4000 tokens needs .* {LIMIT} leaves"):
        list(verifier.handle(opening(4000)))
    assert any(isinstance(answer, Prefilled) for answer in verifier.handle(opening(20)))


def test_memory_that_goes_in_the_middle_of_a_prompt(model: LoadedModel, free: Free) -> None:
    """The request fails between two chunks, and what was open goes on."""
    verifier = Verifier(model, 64)
    answers = verifier.handle(opening(1000))
    next(answers)
    next(answers)
    free.bytes = 0
    with pytest.raises(OutOfMemory, match=LIMIT):
        list(answers)
    free.bytes = 1 << 50
    assert any(isinstance(answer, Prefilled) for answer in verifier.handle(opening(20)))


def test_what_keys_and_values_may_take_names_its_limit(free: Free) -> None:
    """Half of what is left, or what was said."""
    free.bytes = 2000
    assert count_kv_tokens(KVSize(10, 100), 0) == (90, f"kv_bytes; half of what {LIMIT} leaves")
    assert count_kv_tokens(KVSize(10, 100), 500) == (40, "kv_bytes")
    assert count_kv_tokens(KVSize(0, 100), 500).tokens == 0


def prepared(tmp_path: Path, family: str, *, drafts: bool = True) -> tuple[Any, PassMemory, Any]:
    """A target, the reckoning of its passes, and an empty state."""
    folder = write_tiny_model(tmp_path / family, family, config=STATES.get(family))
    module = load(folder).module
    target = prepare(module)
    kv = measure_kv(module, target.states.make)
    memory = PassMemory(module, kv, lambda: False, logits=drafts)
    return target, memory, target.states.make()


def take(target: Any, state: Any, rows: int, *, whole: bool = True) -> int:
    """Bytes that MLX takes at most for a pass over so many more tokens."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    state.append(rows, whole=whole)
    logits = target.verify(mx.array([[1] * rows]), cache=state.caches)
    mx.eval(logits)
    state.commit(state.length)
    state.evaluate()
    return int(mx.get_peak_memory() - before)


def opening(tokens: int) -> OpenSequence:
    """A prompt of so many tokens."""
    return OpenSequence(sequence=1, tokens=[5] * tokens, sampling=Sampling())
