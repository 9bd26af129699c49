"""`torchrun --nproc-per-node N train.py TARGET OUT --texts DIR [DIR ...]`: a drafter from texts.

`texts.py` kept the likeliest tokens of each distribution that it drew from, so the target does not
run here: on a card ten times as many tokens a second as `ssd distill`, which trains on any device
and for any family. Rank N reads the N-th share of the texts' folders. OUT is what `ssd distill`
calls `carried/`: the layers in 4 bits, for `python -m services.tools.build_drafter`.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from layers import Student
from optimizer import Optimizer
from packed import packed
from rows import Rows, frequent
from safetensors.torch import save_file
from weights import read_config, read_weights

_LAST_RATE = 0.02
_WARM_UP = 0.02
_SAY_S = 15.0


class Group(NamedTuple):
    """The processes of a run, one a card."""

    rank: int
    count: int

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes."""
        if self.count > 1:
            dist.all_reduce(numbers)
        return numbers


def loss_of(
    logits: torch.Tensor, ids: torch.Tensor, logs: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross-entropy at temperature 1 and total variation at `temperature`, both [count].

    `ids` [count, top] are columns of the logits, -1 what the head does not have.
    """
    there = ids >= 0
    logits = logits.float()
    chosen = logits.gather(1, ids.clamp(min=0))
    p = torch.where(there, logs.exp(), 0.0)
    entropy = p.sum(-1) * logits.logsumexp(-1) - (p * chosen).sum(-1)
    cooled = torch.where(there, (logs / temperature).softmax(-1), 0.0)
    q = (chosen / temperature - (logits / temperature).logsumexp(-1, keepdim=True)).exp()
    return entropy, 1.0 - torch.minimum(cooled, q).sum(-1)


def train(student: Student, rows: Rows, group: Group, flags: argparse.Namespace) -> None:
    """Train for `flags.seconds`: cross-entropy, then total variation, at last over packed weights."""
    optimizer = Optimizer(student.parameters(), flags.rate, flags.small_rate)
    temperature = torch.tensor(flags.temperature, device=student.device)
    began = said = time.monotonic()
    spent, step, tokens = 0.0, 0, 0
    shares: list[torch.Tensor] = []
    for batch in rows.batches(flags.batch, flags.seed):
        student.rounds = spent > 1 - flags.packed
        logits = student.logits(batch.tokens, batch.positions)
        entropy, variation = loss_of(logits, batch.ids, batch.logs, temperature)
        in_tv = spent > 1 - flags.finish
        loss = (variation if in_tv else entropy).mean()
        loss.backward()
        now = (time.monotonic() - began) / flags.seconds
        shares.append(
            optimizer.step(rate_at(spent), lambda flat: group.sum(flat) / group.count, now)
        )
        # All processes must agree, and the host prepares a step while the device computes.
        spent = float(shares[-2]) if step else 0.0
        step, tokens = step + 1, tokens + batch.tokens.numel()
        if time.monotonic() - said > _SAY_S and group.rank == 0:
            said = time.monotonic()
            speed = group.count * tokens / (said - began)
            accepted = 1 - variation.mean().item()
            print(f"{spent:.3f} step {step} ce {entropy.mean():.4f} accepted {accepted:.4f} {speed:.0f} tok/s epoch {rows.epoch}", flush=True)  # fmt: skip
        if spent >= 1:
            return


def rate_at(spent: float) -> float:
    """Return the share of the highest learning rate: a linear rise, then half a cosine."""
    fall = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(spent, 1.0)))
    return min(1.0, (spent + 1e-3) / _WARM_UP) * fall


@torch.no_grad()
def agreement(student: Student, held: Rows, size: int) -> dict[str, float]:
    """Return by category how often both have the same best token in greedy answers."""
    right: dict[str, list[int]] = {}
    for batch in held.in_order(size):
        best = student.logits(batch.tokens, batch.positions).argmax(-1)
        same = (best == batch.ids[:, 0]).cpu().numpy()
        for number, hit in zip(batch.rows, same, strict=True):
            if held.infos[number].temperature == 0:
                right.setdefault(held.infos[number].category, []).append(int(hit))
    everything = [hit for hits in right.values() for hit in hits]
    right["all"] = everything
    return {name: round(sum(hits) / max(1, len(hits)), 4) for name, hits in sorted(right.items())}


def write(out: Path, student: Student, config: dict[str, Any], head: list[int]) -> None:
    """Write the folder `carried/`."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, weight in student.named_weights():
        weights |= packed(name, weight) if weight.ndim == 2 else {name: weight.half()}
    save_file({name: w.cpu().contiguous() for name, w in weights.items()}, out / "model.safetensors", {"format": "mlx"})  # fmt: skip
    left = ("quantization", "quantization_config")
    config = {key: value for key, value in config.items() if key not in left}
    config |= {"num_hidden_layers": student.layers, "intermediate_size": student.mlp}
    config |= {"torch_dtype": "float16", "quantization": {"group_size": 32, "bits": 4}}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "draft_head.json").write_text(json.dumps(head))


def _read_init(folder: Path | None, device: str) -> dict[str, torch.Tensor] | None:
    """Return the weights of a drafter to start from."""
    if folder is None:
        return None
    return read_weights(folder, read_config(folder), device, torch.float32)


def _group() -> tuple[Group, str]:
    if not torch.cuda.is_available():
        return Group(0, 1), "cpu"
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    return Group(rank, dist.get_world_size()), f"cuda:{rank}"


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--init", type=Path, help="the drafter to start from, as written here")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mlp", type=int, default=2176)
    parser.add_argument("--head", type=int, default=16000)
    parser.add_argument("--batch", type=int, default=65536, help="tokens a card and step")
    parser.add_argument("--rate", type=float, default=0.02, help="of matrices")
    parser.add_argument("--small-rate", type=float, default=0.003, help="of biases and norms")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the total variation")
    parser.add_argument("--finish", type=float, default=0.4, help="share of it")
    parser.add_argument("--packed", type=float, default=0.15, help="share over 4-bit weights")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train a drafter."""
    flags = _flags()
    group, device = _group()
    config = read_config(flags.target)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    weights = read_weights(flags.target, config, device, dtype)
    rows = Rows(flags.texts[group.rank :: group.count], device)
    counts = group.sum(rows.counts(config["vocab_size"], device))
    head = frequent(counts, flags.head, config)
    held = rows.split(head)
    init = _read_init(flags.init, device)
    student = Student(config, weights, (flags.layers, flags.mlp), head, init)
    del weights, init
    if group.rank == 0:
        print(f"{rows.answered} tokens of answers, {student.size} weights, head of {len(head)}", flush=True)  # fmt: skip
    train(student, rows, group, flags)
    if group.rank == 0:
        student.rounds = True
        print(json.dumps(agreement(student, held, flags.batch)), flush=True)
        write(flags.out, student, config, [int(token) for token in head])
    if group.count > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
