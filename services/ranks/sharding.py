"""One rank's part of a model, by mlx-lm's own `shard` (tensor-parallel) or `pipeline`."""

import faulthandler
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from protocol.errors import ModelError, RuntimeFailure
from protocol.settings import Device, RankBackend
from services.kv.budget import count_kv_tokens, measure_kv
from services.mlx.device import bind
from services.mlx.loader import LoadedModel, compute_unit, load
from services.ranks.environment import Variables, export_variables
from services.ranks.link import measure_link
from services.ranks.messages import RankFacts
from services.verifier.target_model import TargetModel, prepare

_HEADS = ("n_heads", "n_kv_heads", "num_heads", "num_key_value_heads", "num_attention_heads")


class RankModel(NamedTuple):
    """One rank's part, ready for passes."""

    loaded: LoadedModel
    target: TargetModel
    """Of this part alone: its passes compute with the other ranks, but do not announce it."""
    facts: RankFacts

    @property
    def windows(self) -> list[int | None]:
        """Of the layers of this part."""
        return [cache.window for cache in self.target.states.make().caches]


def join_group(
    backend: RankBackend, variables: Variables, device: Device, timeout_s: float
) -> mx.distributed.Group:
    """Compute on this device, and meet the other ranks; returns when all are there.

    MLX waits for the others without end and lets no other thread of Python work meanwhile, so
    that one that died would keep us for ever: after `timeout_s` this process ends.

    Raises:
        UsageError: there is no such device.
        RuntimeFailure: this MLX lacks the backend, or a rank was not found.
    """
    # MLX calls the ring of JACCL by the same name.
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
    folder: Path, group: mx.distributed.Group, split: Sequence[int], kv_bytes: int
) -> RankModel:
    """Load this rank's part of the model, and try it out together with the others.

    All ranks must call this at the same time: it computes with all of them.

    Raises:
        ModelError: the model cannot be divided like this, or its state cannot be rewound.
    """
    loaded = load(folder, partial(_shard, group=group, split=list(split)))
    module = loaded.module
    wait_for_all(group)
    # A pipelined model sends and receives between its layers, for one sequence at a time.
    target = prepare(module, is_part=True, may_share_passes=not is_pipelined(module))
    if not target.states.rewinds:
        raise ModelError(
            "a model whose state cannot be rewound is not spread over ranks; "
            "leave out --target-ranks and --hosts"
        )
    latency_ms, mbytes_per_s = measure_link(group)
    weights: Any = tree_flatten(module.parameters())
    facts = RankFacts(
        compute_unit=compute_unit(),
        shares_passes=target.shares_passes,
        kv_tokens=count_kv_tokens(measure_kv(module, target.states.make), kv_bytes).tokens,
        weight_bytes=sum(array.nbytes for _, array in weights),
        latency_ms=latency_ms,
        mbytes_per_s=mbytes_per_s,
    )
    return RankModel(loaded, target, facts)


def wait_for_all(group: mx.distributed.Group) -> None:
    """Return when all ranks have come here."""
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))


def is_pipelined(module: Any) -> bool:
    """Whether this is one stage of several."""
    return int(getattr(getattr(module, "model", None), "pipeline_size", 1)) > 1


def _shard(module: Any, *, group: mx.distributed.Group, split: list[int]) -> None:
    """Leave only this rank's part; the weights are lazy and those of others are never read."""
    stages = getattr(getattr(module, "model", None), "pipeline", None)
    if split or not hasattr(module, "shard"):
        if stages is None:
            raise ModelError(
                "mlx-lm cannot pipeline this kind of model; leave out --split"
                if hasattr(module, "shard")
                else "mlx-lm can neither shard nor pipeline this kind of model"
            )
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


def _check_heads(module: nn.Module, ranks: int) -> None:
    """mlx-lm divides the numbers of heads without looking whether anything is left over."""
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


def bare_facts(group: mx.distributed.Group) -> RankFacts:
    """What a rank without a model knows: its link; all ranks must call this at the same time."""
    wait_for_all(group)
    latency_ms, mbytes_per_s = measure_link(group)
    return RankFacts(
        compute_unit=compute_unit(),
        shares_passes=False,
        kv_tokens=0,
        weight_bytes=0,
        latency_ms=latency_ms,
        mbytes_per_s=mbytes_per_s,
    )
