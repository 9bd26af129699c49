"""What trees could bring with a pair of models: the drafter's trees beside the target's tokens.

`python docs/lab/tree_gain.py record TARGET DRAFTER PROMPTS OUT --temp 0.7` lets the target answer,
then has the drafter grow a tree behind every STEP-th token of the answers, and notes its shape, its
confidences, and which of its tokens the target said. `python docs/lab/tree_gain.py bound OUT`
prints how often the target's token is the drafter's first, second, ... choice, and how many
tokens a round brings whose draft is always ready: with chains, with runners-up that are leaves, with
trees, and with the best tree that could have been chosen afterwards. No speed is measured.
"""

# ruff: noqa: E402  # the BLAS must be loaded before MLX

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.mlx.blas import load_blas

load_blas(os.cpu_count() or 1)

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_tokenizer

from orchestrator.learning.calibration import (
    Calibration,
    acceptance_rates,
    calibrate_siblings,
)
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.tree_choice import rank_nodes
from protocol.decoding.sampler import sample
from protocol.decoding.sampling_params import drafter_sampling
from protocol.messages import Sampling
from services.batching.packing import enable_packing
from services.drafter.backends.base import RoundOptions
from services.drafter.backends.mlx import MlxBackend
from services.mlx.device import bind
from services.mlx.loader import load

SIBLINGS, GROWN, DEPTH = 7, 16, 8
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def answer(model: Any, prompt: list[int], count: int, sampling: Sampling, ends: set[int]) -> Any:
    """The target's own tokens after a prompt."""
    caches, tokens = make_prompt_cache(model), list(prompt)
    fresh = prompt
    for _ in range(count):
        row = model(mx.array(fresh)[None], cache=caches)[0, -1:]
        fresh = sample(np.array(row.astype(mx.float32)), [len(tokens)], sampling)
        tokens += fresh
        if fresh[0] in ends:
            break
    return tokens[len(prompt) :]


def grow(backend: MlxBackend, tokens: list[int], truth: list[int]) -> dict[str, Any]:
    """The drafter's tree behind `tokens`, the last of which is pending."""
    backend.commit(1, 0, tokens[:-1])
    options = RoundOptions(siblings=SIBLINGS, grown_siblings=GROWN)
    draft, ends, right = Draft(), [0], {0: 0}
    for layer in backend.draft_tree(1, tokens[-1], DEPTH, options):
        if layer is None:
            continue
        behind = [ends[parent] for parent in layer.parents]
        ends = []
        for token, confidence, parent in zip(layer.tokens, layer.confidences, behind, strict=True):
            row = draft.add(token, confidence, parent=parent)
            ends.append(row)
            depth = right.get(parent, len(truth))
            if depth < len(truth) and truth[depth] == token:
                right[row] = depth + 1
    return {
        "parents": draft.parents,
        "confidences": [round(one, 5) for one in draft.confidences],
        "right": sorted(right),
    }


def record(arguments: argparse.Namespace) -> None:
    """Write one line for each tree."""
    bind("cpu")
    target = load(arguments.target)
    enable_packing(target.module)
    tokenizer = load_tokenizer(arguments.target)
    backend = MlxBackend(arguments.drafter, 512)
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    with arguments.out.open("w", encoding="utf-8") as out:
        for number, line in enumerate(lines):
            question = json.loads(line)
            messages = [{"role": "user", "content": question["prompt"]}]
            prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
            sampling = Sampling(temperature=arguments.temp, seed=number)
            ends = set(tokenizer.eos_token_ids)
            said = answer(target.module, prompt, arguments.tokens, sampling, ends)
            for _ in backend.open(1, prompt[:-1], drafter_sampling(sampling)):
                pass
            for at in range(0, len(said) - 1, arguments.step):
                grown = grow(backend, prompt + said[: at + 1], said[at + 1 :])
                out.write(json.dumps({"kind": question["category"], "at": at, **grown}) + "\n")
            backend.close(1)
            out.flush()


# ------------------------------------------------------------ what was recorded


class Calibrated:
    """Acceptance by confidence, learned of these trees as the planner does it."""

    def __init__(self, trees: list[dict[str, Any]]) -> None:
        self._first, self._others = Calibration(), calibrate_siblings()
        for tree in trees:
            for rows, chosen in reached(tree):
                for place, row in enumerate(rows):
                    curve = self._others if place else self._first
                    curve.observe(tree["confidences"][row - 1], accepted=place == chosen)

    def chances(self, tree: dict[str, Any]) -> Any:
        """The rows of a tree, the likeliest path first, and how likely each is."""
        rates = acceptance_rates(tree["confidences"], tree["parents"], self._first, self._others)
        return rank_nodes(tree["parents"], rates)


def reached(tree: dict[str, Any]) -> Iterator[tuple[list[int], int | None]]:
    """Along the target's path: the rows behind each of its tokens, and the place of the next."""
    right = tree["right"]
    for at, parent in enumerate(right):
        rows = [row for row, one in enumerate(tree["parents"], 1) if one == parent]
        following = right[at + 1] if at + 1 < len(right) else None
        if rows:
            yield rows, rows.index(following) if following is not None else None


def ranks(trees: list[dict[str, Any]]) -> list[float]:
    """How often the target's token is the first, second, ... choice, the path before being right."""
    counts, total = np.zeros(SIBLINGS + 1), 0
    for tree in trees:
        for _, chosen in reached(tree):
            total += 1
            if chosen is not None:
                counts[chosen] += 1
    return (counts / total).tolist()  # type: ignore[no-any-return]


def cut(tree: dict[str, Any], *, leaves: bool) -> dict[str, Any]:
    """Only the likeliest chain; with `leaves`, and the runners-up beside it."""
    draft = Draft(confidences=tree["confidences"], tokens=[0] * len(tree["parents"]),
                  parents=tree["parents"])  # fmt: skip
    main = draft.main
    kept = {0, *main}
    if leaves:
        kept |= {row for row, parent in enumerate(tree["parents"], 1) if parent in kept}
    rows = sorted(kept - {0})
    places = {0: 0, **{row: place for place, row in enumerate(rows, 1)}}
    return {
        **tree,
        "parents": [places[tree["parents"][row - 1]] for row in rows],
        "confidences": [tree["confidences"][row - 1] for row in rows],
        "right": [places[row] for row in tree["right"] if row in places],
    }


def expected(trees: list[dict[str, Any]], size: int) -> float:
    """Tokens a round with the `size` likeliest nodes of each tree, the bonus token included."""
    learned = Calibrated(trees)
    kept = [set(learned.chances(tree).rows[:size]) for tree in trees]
    return 1.0 + sum(
        sum(row in rows for row in tree["right"]) for tree, rows in zip(trees, kept, strict=True)
    ) / len(trees)


def best_static(chances: list[float], size: int) -> float:
    """Tokens of the best tree of `size` nodes if ranks were drawn alike at every place.

    Its nodes are the likeliest paths: no node is likelier than its parent.
    """
    paths, total = [1.0], 1.0
    waiting = [chance for chance in chances if chance > 0.0]
    for _ in range(size):
        if not waiting:
            break
        best = max(waiting)
        waiting.remove(best)
        total += best
        waiting += [best * chance for chance in chances if chance > 0.0]
        paths.append(best)
    return total


def bound(arguments: argparse.Namespace) -> None:
    """Print the tables."""
    lines = arguments.record.read_text(encoding="utf-8").splitlines()
    trees = [json.loads(line) for line in lines]
    chains = [cut(tree, leaves=False) for tree in trees]
    leaves = [cut(tree, leaves=True) for tree in trees]
    by_rank = ranks(trees)
    print(f"{len(trees)} trees; by rank", [round(one, 3) for one in by_rank])
    print(
        "choice by the path so far:", [round(one, 3) for one in ranks(chains)[:1]], "on the chain"
    )
    print("nodes  chain  leaves  trees  trees/chain  any tree  static chain  static tree")
    longest = max(expected(chains, size) for size in SIZES)
    for size in SIZES:
        chain, leaf, tree = (expected(some, size) for some in (chains, leaves, trees))
        static = best_static(by_rank[:1], size), best_static(by_rank, size)
        ever = 1.0 + sum(min(size, len(one["right"]) - 1) for one in trees) / len(trees)
        print(
            f"{size:5d} {chain:6.3f} {leaf:7.3f} {tree:6.3f} {tree / longest:12.3f}"
            f" {ever:9.3f} {static[0]:13.3f} {static[1]:12.3f}"
        )
    for kind in dict.fromkeys(tree["kind"] for tree in trees):
        mine = [one for one in trees if one["kind"] == kind]
        alone = expected([cut(one, leaves=False) for one in mine], 16)
        print(f"{kind}: chain {alone:.3f}, trees of 15 and 31 nodes "
              f"{expected(mine, 15):.3f} {expected(mine, 31):.3f}")  # fmt: skip


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    recorder = commands.add_parser("record")
    for name in ("target", "drafter", "prompts", "out"):
        recorder.add_argument(name, type=Path)
    recorder.add_argument("--temp", type=float, default=0.0)
    recorder.add_argument("--tokens", type=int, default=64)
    recorder.add_argument("--step", type=int, default=2)
    recorder.set_defaults(run=record)
    reader = commands.add_parser("bound")
    reader.add_argument("record", type=Path)
    reader.set_defaults(run=bound)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
