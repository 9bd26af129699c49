"""Sampling thousands of rows from a Llama or Qwen 2 at once, each at a place of its own.

A step feeds every row's next token, whether it was given or chosen, and is one CUDA graph: the
host only replays it. Rows that are finished are exchanged every few steps, and what is given of
the new ones is fed in one go. Attention, rotation and choice are kernels in Triton (`kernels.py`);
elsewhere the same in PyTorch (`plain.py`).
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as fn
from plain import turn
from weights import read_config, read_weights

from services.distill.data import ANSWER, GIVEN, USER

_USER = 0.85
"""Temperature of invented prompts."""
_STEPS = 16
"""Between two looks at which rows are finished."""


class Template(NamedTuple):
    """The chat template's tokens."""

    opening: list[int]
    turn: list[int]
    stops: list[int]
    user_tokens: int = 256


class Row(NamedTuple):
    """What is to be continued."""

    given: list[int]
    temperature: float
    category: str
    answer: int
    """Tokens of the answer at most."""
    invents: bool = False
    """Whether it goes on with the user's words, else with the answer."""


class Written(NamedTuple):
    """A finished row."""

    row: Row
    tokens: Any
    """[length] int32"""
    kinds: Any
    """[length] uint8, see `services.distill.data`."""
    top_ids: Any
    """[length, top] int32, the likeliest tokens to follow each."""
    top_logs: Any
    """[length, top] float16, their log-probabilities at temperature 1."""


class Model:
    """The forward pass of a Llama or Qwen 2 over rows at places of their own."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        config = read_config(folder)
        weights = read_weights(folder, config, device, dtype)
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.width: int = config["hidden_size"]
        self.size: int = config.get("head_dim") or self.width // self.heads
        self.embedding = weights["model.embed_tokens.weight"]
        self.vocabulary: int = len(self.embedding)
        self._epsilon: float = config["rms_norm_eps"]
        self._head = weights.get("lm_head.weight", self.embedding)
        self._norm = weights["model.norm.weight"]
        self._blocks = [_block(weights, f"model.layers.{i}.") for i in range(self.layers)]
        half = torch.arange(0, self.size, 2, device=device, dtype=torch.float32) / self.size
        places = torch.arange(8192, device=device, dtype=torch.float32)
        angles = torch.outer(places, config["rope_theta"] ** -half)
        self.turns = angles.cos(), angles.sin()
        self.steps: Any = importlib.import_module("kernels" if device != "cpu" else "plain")
        """What one token of every row needs besides products."""

    def run(self, tokens: torch.Tensor, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        """[count, width] after all layers; `attention(layer, qkv)` -> [count, heads x size]."""
        x = fn.embedding(tokens, self.embedding)
        for layer, block in enumerate(self._blocks):
            h = fn.rms_norm(x, (self.width,), block["in"], self._epsilon)
            attended = attention(layer, fn.linear(h, block["qkv"], block.get("qkv_bias")))
            x = torch.addmm(x, attended, block["out"].T)
            h = fn.rms_norm(x, (self.width,), block["post"], self._epsilon)
            gate, up = fn.linear(h, block["gate_up"]).chunk(2, dim=-1)
            x = torch.addmm(x, fn.silu(gate) * up, block["down"].T)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[count, vocabulary]"""
        return fn.linear(fn.rms_norm(x, (self.width,), self._norm, self._epsilon), self._head)

    def rotate_all(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [rows, heads, count, size] of whole rows from their start."""
        rows, count, _ = qkv.shape
        heads = qkv.view(rows, count, -1, self.size).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos, sin = (turn[:count] for turn in self.turns)
        return [turn(q, cos, sin), turn(k, cos, sin), v]


def _block(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Take a layer's weights, what belongs together joined."""
    attention, mlp = f"{name}self_attn.", f"{name}mlp."

    def joined(names: list[str]) -> torch.Tensor:
        return torch.cat([weights.pop(one) for one in names])

    block = {
        "in": weights[f"{name}input_layernorm.weight"],
        "post": weights[f"{name}post_attention_layernorm.weight"],
        "qkv": joined([f"{attention}{part}_proj.weight" for part in "qkv"]),
        "out": weights[f"{attention}o_proj.weight"],
        "gate_up": joined([f"{mlp}{part}_proj.weight" for part in ("gate", "up")]),
        "down": weights[f"{mlp}down_proj.weight"],
    }
    if f"{attention}q_proj.bias" in weights:
        block["qkv_bias"] = joined([f"{attention}{part}_proj.bias" for part in "qkv"])
    return block


class Rows:
    """Rows in decoding; everything stays where it is on the device, so that a graph can act."""

    def __init__(
        self, model: Model, template: Template, count: int, length: int, seed: int, top: int
    ) -> None:
        device = model.embedding.device
        self._model, self._template, self._device = model, template, device
        self._count, self._length = count, length
        shape = (count, model.kv_heads, length, model.size)
        self._kept = [
            (model.embedding.new_zeros(shape), model.embedding.new_zeros(shape))
            for _ in range(model.layers)
        ]
        self._tokens = torch.zeros((count, length), dtype=torch.int64, device=device)
        self._kinds = torch.zeros((count, length), dtype=torch.uint8, device=device)
        whole: Any = {"dtype": torch.int64, "device": device}
        self._top_ids = torch.zeros((count, length, top), dtype=torch.int32, device=device)
        self._top_logs = torch.zeros((count, length, top), dtype=torch.float16, device=device)
        self._place = torch.zeros(count, **whole)
        self._limit = torch.zeros(count, **whole)
        self._answer = torch.zeros(count, **whole)
        self._user_ends = torch.zeros(count, **whole)
        self._answering = len(template.turn)
        self._done = self._answering + 1
        self._phase = torch.full((count,), self._done, **whole)
        self._heat = torch.zeros(count, device=device)
        self._seed = torch.full((1,), seed, dtype=torch.int32, device=device)
        self._all = torch.arange(count, device=device)
        self._turn = torch.tensor(template.turn, device=device)
        self._stops = torch.tensor(template.stops, device=device)
        ends = [*template.stops, template.turn[0], *template.opening[:1]]
        self._user_stops = torch.tensor(ends, device=device)
        self._graph: Any = None
        self.rows: list[Row | None] = [None] * count

    def step(self) -> None:
        """One token of every row."""
        model, place = self._model, self._place
        tokens = self._tokens[self._all, place]

        def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            kept = self._kept[layer]
            queries = model.steps.rotate(qkv, model.turns, place, kept, model.heads)
            return model.steps.attend(queries, kept, place).view(self._count, -1)

        logits = model.logits(model.run(tokens, attention))
        best, ids = logits.topk(self._top_ids.shape[-1])
        self._top_ids[self._all, place] = ids.to(torch.int32)
        whole = logits.float().logsumexp(-1, keepdim=True)
        self._top_logs[self._all, place] = (best.float() - whole).half()
        inventing = self._phase == 0
        heat = torch.where(inventing, _USER, self._heat)
        chosen = model.steps.choose(logits, heat, self._seed)
        self._seed += 1
        self._move(chosen, inventing)

    def _move(self, chosen: torch.Tensor, inventing: torch.Tensor) -> None:
        """Keep what was chosen, or the template's tokens where it is their turn."""
        phase, following = self._phase, self._place + 1
        stops = (chosen[:, None] == self._stops).any(-1)
        over = following >= self._user_ends
        ends = inventing & ((chosen[:, None] == self._user_stops).any(-1) | over)
        in_turn = (phase > 0) & (phase < self._answering)
        answering = phase == self._answering
        turned = self._turn[phase.clamp(max=self._answering - 1)]
        token = torch.where(ends, self._turn[0], torch.where(in_turn, turned, chosen))
        kind = torch.where(answering, ANSWER, torch.where(ends | in_turn, GIVEN, USER))
        active = phase != self._done
        at = following.clamp(max=self._length - 1)
        self._tokens[self._all, at] = torch.where(active, token, self._tokens[self._all, at])
        kept = self._kinds[self._all, at]
        self._kinds[self._all, at] = torch.where(active, kind.to(torch.uint8), kept)
        moved = torch.where(ends | in_turn, phase + 1, phase)
        # The answer's length is known once it begins.
        begins = active & (moved == self._answering) & ~answering
        limit = torch.where(begins, following + 1 + self._answer, self._limit)
        self._limit.copy_(limit.clamp(max=self._length))
        full = active & (following + 1 >= self._limit) & (moved == self._answering)
        self._phase.copy_(torch.where((answering & stops) | full, self._done, moved))
        self._place.copy_(torch.where(active, at, self._place))

    def advance(self) -> None:
        """A few steps; on CUDA replayed from a graph."""
        if self._device.type != "cuda":
            for _ in range(_STEPS):
                self.step()
            return
        if self._graph is None:
            self._graph = self._capture()
        for _ in range(_STEPS):
            self._graph.replay()

    def _capture(self) -> Any:
        state = (self._tokens, self._kinds, self._place, self._limit, self._phase, self._seed)
        before = [part.clone() for part in state]
        for _ in range(2):
            self.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for part, was in zip(state, before, strict=True):
            part.copy_(was)
        return graph

    def free(self) -> list[int]:
        """Places whose row is finished, or that have none."""
        return [int(at) for at in (self._phase == self._done).nonzero()[:, 0]]

    def take(self, places: list[int]) -> list[Written]:
        """What was written at these places; they are empty then."""
        places = [at for at in places if self.rows[at] is not None]
        index = torch.tensor(places, dtype=torch.int64, device=self._device)
        tokens = self._tokens[index].to(torch.int32).cpu().numpy()
        kinds = self._kinds[index].cpu().numpy()
        ids, logs = (part[index].cpu().numpy() for part in (self._top_ids, self._top_logs))
        found = []
        for at, *parts in zip(places, tokens, kinds, ids, logs, strict=True):
            row = self.rows[at]
            if row is not None:
                found.append(Written(row, *parts))
            self.rows[at] = None
        return found

    def put(self, places: list[int], rows: list[Row]) -> None:
        """Begin rows at these places: all given tokens but the last are fed."""
        longest = max(len(row.given) for row in rows)
        given = np.zeros((len(rows), self._length), np.int64)
        kinds = np.zeros((len(rows), self._length), np.uint8)
        for number, row in enumerate(rows):
            given[number, : len(row.given)] = row.given
            kinds[number, : len(row.given)] = GIVEN
            self.rows[places[number]] = row
        index = torch.tensor(places, device=self._device)
        self._tokens[index] = torch.from_numpy(given).to(self._device)
        self._kinds[index] = torch.from_numpy(kinds).to(self._device)
        self._set(self._place, index, [len(row.given) - 1 for row in rows])
        self._set(self._answer, index, [row.answer for row in rows])
        limits = [self._length if r.invents else len(r.given) + r.answer for r in rows]
        self._set(self._limit, index, [min(self._length, limit) for limit in limits])
        user = self._template.user_tokens
        self._set(self._user_ends, index, [len(row.given) + user for row in rows])
        self._set(self._phase, index, [0 if row.invents else self._answering for row in rows])
        self._set(self._heat, index, [row.temperature for row in rows])
        if longest > 1:
            self._fill(index, self._tokens[index, : longest - 1])

    def _set(self, state: torch.Tensor, index: torch.Tensor, values: list[Any]) -> None:
        state[index] = torch.tensor(values, dtype=state.dtype, device=self._device)

    def _fill(self, index: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keys and values of given tokens [rows, count]; what pads them is overwritten later."""
        model = self._model
        rows, count = tokens.shape
        repeat = model.heads // model.kv_heads

        def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = model.rotate_all(qkv.view(rows, count, -1))
            for cache, new in zip(self._kept[layer], (k, v), strict=True):
                cache[index, :, :count] = new
            k, v = (part.repeat_interleave(repeat, dim=1) for part in (k, v))
            out = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).reshape(rows * count, -1)

        model.run(tokens.reshape(-1), attention)


@torch.inference_mode()
def write(
    rows: Rows, groups: Iterator[list[Row]], goes_on: Callable[[], bool]
) -> Iterator[Written]:
    """Continue all rows, as many at a time as there is room for; ends early if told to."""
    waiting: list[Row] | None = next(groups, None)
    while goes_on():
        free = rows.free()
        yield from rows.take(free)
        while waiting is not None and len(waiting) <= len(free):
            rows.put(free[: len(waiting)], waiting)
            free = free[len(waiting) :]
            waiting = next(groups, None)
        if waiting is None and len(free) == len(rows.rows):
            return
        rows.advance()
    yield from rows.take(list(range(len(rows.rows))))
