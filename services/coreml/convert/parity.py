"""Compare a package with its model after the same texts, on real prompts.

The texts are greedy answers: the target's, if there is one, otherwise the model's own. The package
is *teacher-forced* along them, since in float16 one rounding tie would make two free runs diverge.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from protocol.decoding.sampler import Floats, Ids
from protocol.errors import UsageError
from protocol.jobs.convert import TIE, Agreement, DraftAcceptance, Route, TokenDifference
from protocol.messages import Tokens
from protocol.settings import FREQUENT_TOKENS
from services.coreml.model import ConvertedModel, chain_feed
from services.kernels.cpu.equip import equip, takes
from services.kernels.register import kernels
from services.mlx.lm_head import trim_head
from services.mlx.loader import load
from services.sampling.candidates import Top

_TOP = 8


class AnsweredPrompt(NamedTuple):
    """A prompt and its greedy answer."""

    prompt: Tokens
    answer: Tokens


class ParityDistributions(NamedTuple):
    """A model's logits at every compared position."""

    rows: Floats
    """[positions, columns] float32."""
    ids: Ids
    """[columns] token id of each column."""

    def probabilities(self, vocabulary: int) -> Floats:
        """Return [positions, vocabulary]."""
        powers = np.exp(self.rows - self.rows.max(axis=1, keepdims=True))
        spread = np.zeros((len(powers), vocabulary), np.float32)
        spread[:, self.ids] = powers / powers.sum(axis=1, keepdims=True)
        return spread


def write_answers(folder: Path, prompts: list[Tokens], count: int) -> Iterator[AnsweredPrompt]:
    """Yield a greedy answer of `count` tokens to each prompt.

    On a CPU our kernels write it, which read the weights as they are stored: any text will do that
    is like the model's own.
    """
    loaded = load(folder, as_stored=takes)
    module: Any = loaded.module
    head_ids = trim_head(module, folder, FREQUENT_TOKENS)
    ids = np.arange(loaded.vocabulary.size) if head_ids is None else head_ids
    if not kernels().on_gpu:
        equip(module)
    for prompt in prompts:
        cache, fed = make_prompt_cache(module), prompt
        answer: Tokens = []
        for _ in range(count):
            row = module(mx.array([fed]), cache=cache)[0, -1, : len(ids)]
            fed = [int(ids[int(mx.argmax(row))])]
            answer += fed
        yield AnsweredPrompt(prompt, answer)


class ParityModel:
    """A model under mlx-lm: its distributions after any text."""

    def __init__(self, folder: Path) -> None:
        loaded = load(folder)
        self._module: Any = loaded.module
        self.vocabulary = loaded.vocabulary
        head_ids = trim_head(self._module, folder, FREQUENT_TOKENS)
        self._ids = np.arange(loaded.vocabulary.size) if head_ids is None else head_ids

    def distributions(self, texts: list[AnsweredPrompt]) -> ParityDistributions:
        """Return distributions after the prompt and after each token of the answer but the last."""
        rows = []
        for text in texts:
            whole = mx.array([text.prompt + text.answer[:-1]])
            logits = self._module(whole, cache=make_prompt_cache(self._module))[0]
            wanted = logits[len(text.prompt) - 1 :, : len(self._ids)].astype(mx.float32)
            rows.append(np.array(wanted))
        return ParityDistributions(np.concatenate(rows), self._ids)


def fit_prompts(prompts: list[Tokens], slots: int, count: int) -> list[Tokens]:
    """Return the ends of the prompts that fit into the state together with an answer."""
    room = slots - 2 * count
    if room < 1:
        raise UsageError(f"{count} tokens to compare do not fit into {slots} slots")
    return [prompt[-room:] for prompt in prompts]


def candidates(
    model: ConvertedModel, texts: list[AnsweredPrompt], route: Route = "tree"
) -> list[Top]:
    """Return the package's best tokens at the same positions, by the functions of a route."""
    tops: list[Top] = []
    for text in texts:
        state, start = model.new_state(), 0
        tokens, first = text.prompt + text.answer[:-1], len(text.prompt) - 1
        while start < len(tokens):
            name, count = _next_call(model, route, start, first - start)
            part = tokens[start : start + count]
            results = model.run(name, chain_feed(part, start, model.slots), state)
            tops += results[max(0, first - start) :]
            start += len(part)
    return tops


def _next_call(model: ConvertedModel, route: Route, start: int, unused: int) -> tuple[str, int]:
    """Return (function, most tokens); no candidates are needed after the next `unused` tokens."""
    name = "tree" if route == "tree" else "decode"
    if unused > 0 and route != "decode":
        name = "prefill"
    limit = model.manifest.function(name).tokens
    if start + limit > model.slots:
        return "decode", 1
    return name, min(limit, unused) if name == "prefill" else limit


def agreement(reference: ParityDistributions, tops: list[Top]) -> Agreement:
    """Compute how close the package is to the model."""
    best = np.sort(reference.rows, axis=1)[:, -2:]
    margins = best[:, 1] - best[:, 0]
    chosen = reference.ids[reference.rows.argmax(axis=1)]
    found = np.array([top.ids[0, 0] for top in tops])
    same = found == chosen
    clear = margins >= TIE
    order = np.argsort(-reference.rows, axis=1)[:, :_TOP]
    shared = [
        np.isin(reference.ids[columns], top.ids[0, :_TOP]).mean()
        for columns, top in zip(order, tops, strict=True)
    ]
    return Agreement(
        tokens=len(same),
        ties=int((~clear).sum()),
        greedy=float(same[clear].mean()) if clear.any() else 1.0,
        greedy_with_ties=float(same.mean()),
        top8=float(np.mean(shared)),
        kl=_divergence(reference, tops),
        worst_margin=float(margins[~same].max(initial=0.0)),
        differences=[
            TokenDifference(int(at), float(margins[at]), int(chosen[at]), int(found[at]))
            for at in np.flatnonzero(~same)
        ],
    )


def _divergence(reference: ParityDistributions, tops: list[Top]) -> float:
    """Return mean KL(model || package) over the reported tokens, all others taken together."""
    totals = np.logaddexp.reduce(reference.rows.astype(np.float64), axis=1)
    column = {int(token): index for index, token in enumerate(reference.ids)}
    divergences = []
    for row, total, top in zip(reference.rows, totals, tops, strict=True):
        p = np.exp(row[[column[int(token)] for token in top.ids[0]]] - total)
        q = np.exp(top.logits[0].astype(np.float64) - top.totals[0])
        rest = np.clip([1 - p.sum(), 1 - q.sum()], 1e-9, None)
        p, q = np.append(p, rest[0]), np.append(q, rest[1])
        divergences.append(float((p * np.log(np.maximum(p, 1e-12) / q)).sum()))
    return float(np.mean(divergences))


def acceptance(target: ParityDistributions, vocabulary: int, tops: list[Top]) -> DraftAcceptance:
    """Compute how much the target would accept of drafts from these candidates."""
    p = target.probabilities(vocabulary)
    chosen = target.ids[target.rows.argmax(axis=1)]
    greedy = np.array([top.ids[0, 0] for top in tops]) == chosen
    overlap = [
        np.minimum(row[top.ids[0]], np.exp(top.logits[0] - top.totals[0])).sum()
        for row, top in zip(p, tops, strict=True)
    ]
    return DraftAcceptance(greedy=float(greedy.mean()), sampled=float(np.mean(overlap)))


def tops_of(reference: ParityDistributions, width: int) -> list[Top]:
    """Return the model's own candidates, as a package would report them."""
    columns = np.argsort(-reference.rows, axis=1)[:, :width]
    logits = np.take_along_axis(reference.rows, columns, axis=1)
    totals = np.logaddexp.reduce(reference.rows, axis=1)
    return [
        Top(reference.ids[columns[i]][None], logits[i : i + 1], totals[i : i + 1])
        for i in range(len(logits))
    ]
