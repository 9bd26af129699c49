"""One rank's part of a model, made by mlx-lm's `shard` (tensor-parallel) or `pipeline`."""

import faulthandler
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from protocol.errors import ModelError, RuntimeFailure
from protocol.settings import Device, RankBackend, RankSplit
from services.engine.target_model import TargetModel, prepare
from services.kernels.register import kernels
from services.kv.budget import count_kv_tokens, measure_kv
from services.kv.rewinding import StateFactory
from services.mlx.device import bind
from services.mlx.free_memory import free_for_mlx
from services.mlx.loader import LoadedModel, load, load_skeleton
from services.mlx.reading import measure_reading
from services.ranks.environment import Variables, export_variables
from services.ranks.link import measure_link
from services.ranks.messages import RankFacts
from services.ranks.mirror import run_pass
from services.ranks.split import LayerSizes, Strength, propose_split

_TRIALS = 3
_HEADS = ("n_heads", "n_kv_heads", "num_heads", "num_key_value_heads", "num_attention_heads")


class RankModel(NamedTuple):
    """One rank's part, ready for passes."""

    loaded: LoadedModel
    target: TargetModel
    """The target of this part alone: its passes compute with the other ranks, without announcing.
    """
    facts: RankFacts

    @property
    def windows(self) -> list[int | None]:
        """Attention windows of the layers of this part."""
        return [cache.window for cache in self.target.states.make().caches]


def join_group(
    backend: RankBackend, variables: Variables, device: Device, timeout_s: float
) -> mx.distributed.Group:
    """Select this device and join the other ranks; returns when all have joined.

    MLX waits for the others without a timeout while blocking all other Python threads, so a dead
    rank would block this one for ever: after `timeout_s` this process exits.

    Raises:
        UsageError: there is no such device.
        RuntimeFailure: this MLX lacks the backend, or a rank was not found.
    """
    # MLX calls JACCL's ring by the same name.
    name = "jaccl" if backend == "jaccl-ring" else backend
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        with export_variables(variables):
            bind(device)
            return mx.distributed.init(strict=True, backend=name)
    except (RuntimeError, ValueError) as error:
        raise RuntimeFailure(f"the ranks do not find each other over {backend}: {error}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def load_part(
    folder: Path, group: mx.distributed.Group, split: RankSplit, kv_bytes: int, local_ranks: int
) -> RankModel:
    """Load this rank's part of the model, and test it together with the others.

    All ranks must call this at the same time: it computes with all of them.

    Args:
        folder: of the whole model.
        group: see `join_group`.
        split: see `RankSplit`.
        kv_bytes: see `VerifierSettings`.
        local_ranks: ranks that share the memory of this machine, this one included.

    Raises:
        ModelError: the model cannot be divided like this, or its state cannot be rewound.
    """
    loaded = load(folder, partial(_shard, group=group, split=split, local_ranks=local_ranks))
    module = loaded.module
    wait_for_all(group)
    # A pipelined model sends and receives between its layers, for one sequence at a time.
    target = prepare(module, is_part=True, may_share_passes=not is_pipelined(module))
    if not target.states.rewinds:
        raise ModelError(
            "a model whose state cannot be rewound cannot be spread over ranks; "
            "leave out --target-ranks and --hosts"
        )
    facts = _facts_of(module, target, group, kv_bytes, local_ranks)
    return RankModel(loaded, target, facts)


def _facts_of(
    module: Any, target: TargetModel, group: mx.distributed.Group, kv_bytes: int, local_ranks: int
) -> RankFacts:
    latency_ms, mbytes_per_s = measure_link(group)
    pass_ms, witness = _try_out(module, target.states)
    return RankFacts(
        compute_unit=kernels().device,
        shares_passes=target.shares_passes,
        kv_tokens=count_kv_tokens(measure_kv(module, target.states.make), kv_bytes).tokens,
        weight_bytes=_bytes_of(module),
        free_bytes=_free_bytes(local_ranks),
        latency_ms=latency_ms,
        mbytes_per_s=mbytes_per_s,
        part=_name_part(module, group),
        pass_ms=pass_ms,
        witness=witness,
    )


def _try_out(module: Any, states: StateFactory) -> tuple[float, float]:
    """Return the milliseconds of a pass of one token, best of a few, and its logits' magnitude."""
    store = states.make()
    best_s, logits = float("inf"), mx.zeros(0)
    for _ in range(_TRIALS):
        store.append(1)
        started = time.perf_counter()
        logits = run_pass(module, mx.array([[1]]), store.caches, logits=True)
        best_s = min(best_s, time.perf_counter() - started)
    witness: Any = mx.linalg.norm(logits.astype(mx.float32)).item()
    return 1e3 * best_s, float(witness)


def _free_bytes(local_ranks: int) -> int:
    """Return the free memory of this rank; ranks of a machine without a GPU each share it."""
    return free_for_mlx().bytes // (1 if kernels().device == "cuda" else local_ranks)


def _bytes_of(module: Any) -> int:
    weights: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in weights)


def _name_part(module: Any, group: mx.distributed.Group) -> str:
    if is_pipelined(module):
        return f"{module.model.start_idx}-{module.model.end_idx - 1}"
    return f"1/{group.size()} of all"


def wait_for_all(group: mx.distributed.Group) -> None:
    """Wait until all ranks have reached this call."""
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))


def is_pipelined(module: Any) -> bool:
    """Return True if this is one stage of several."""
    return int(getattr(getattr(module, "model", None), "pipeline_size", 1)) > 1


def _shard(module: Any, *, group: mx.distributed.Group, split: RankSplit, local_ranks: int) -> None:
    """Keep only this rank's part; the weights are lazy and those of others are never read."""
    if split or not hasattr(module, "shard"):
        stages = _stages_of(module)
        if stages is None:
            raise ModelError(
                "mlx-lm cannot pipeline this kind of model; leave out --split"
                if hasattr(module, "shard")
                else "mlx-lm can neither shard nor pipeline this kind of model"
            )
        if split == "auto":
            split = propose_split(_layer_sizes(module), _gather_strengths(group, local_ranks))
        try:
            stages(group, split or None)
        except ValueError as error:
            raise ModelError(f"--split does not fit the model: {error}") from error
        return
    _check_heads(module, group.size())
    try:
        module.shard(group)
    except ValueError as error:
        raise ModelError(f"the model cannot be divided by {group.size()} ranks: {error}") from error


def _stages_of(module: Any) -> Any | None:
    return getattr(getattr(module, "model", None), "pipeline", None)


def _layer_sizes(module: Any) -> LayerSizes:
    layers = [_bytes_of(layer) for layer in module.model.layers]
    return LayerSizes(len(layers), max(layers), _bytes_of(module) - sum(layers))


def _gather_strengths(group: mx.distributed.Group, local_ranks: int) -> list[Strength]:
    """Gather the strengths of all ranks, the same list on each."""
    wait_for_all(group)
    speed = measure_reading()
    own = mx.array([[float(_free_bytes(local_ranks)), speed]])
    rows: Any = mx.distributed.all_gather(own, group=group).tolist()
    return [Strength(int(free), speed) for free, speed in rows]


class Division(NamedTuple):
    """How a model would be divided."""

    division: str
    obstacle: str
    proposal: list[int]
    """As in `RankProbeResult`, like the other two."""


def plan_division(
    folder: Path, group: mx.distributed.Group, split: RankSplit, ranks: Sequence[Strength]
) -> Division:
    """Divide the model without reading its weights; nothing is computed with the other ranks."""
    module = load_skeleton(folder)
    proposal = list[int]()
    try:
        if _stages_of(module) is not None:
            proposal = propose_split(_layer_sizes(module), ranks)
        _shard(module, group=group, split=proposal if split == "auto" else split, local_ranks=1)
    except ModelError as error:
        return Division("", str(error), proposal)
    return Division(_name_part(module, group), "", proposal)


def _check_heads(module: nn.Module, ranks: int) -> None:
    """Check the numbers of heads, which mlx-lm divides without checking the remainder."""
    for count in sorted(set(_head_counts(module))):
        if count % ranks:
            raise ModelError(
                f"{count} attention heads cannot be divided by {ranks} ranks; "
                "take a number of ranks that divides the heads and the KV heads, or --split"
            )


def _head_counts(module: nn.Module) -> Iterator[int]:
    for _, layer in module.named_modules():
        for name in _HEADS:
            count = getattr(layer, name, None)
            if isinstance(count, int):
                yield count


def bare_facts(group: mx.distributed.Group, local_ranks: int) -> RankFacts:
    """Return the facts of a rank without a model, and of its link.

    All ranks must call this at the same time; `local_ranks` as for `load_part`.
    """
    wait_for_all(group)
    speed = measure_reading()
    latency_ms, mbytes_per_s = measure_link(group)
    return RankFacts(
        compute_unit=kernels().device,
        shares_passes=False,
        kv_tokens=0,
        weight_bytes=0,
        free_bytes=_free_bytes(local_ranks),
        read_bytes_s=speed,
        latency_ms=latency_ms,
        mbytes_per_s=mbytes_per_s,
    )
