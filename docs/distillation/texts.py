"""`python texts.py TARGET OUT --seconds N --seed S`: texts for `ssd distill --texts OUT`.

The target writes passages, answers prompts of nine kinds (`prompts.py`, `reading.py`) at four
temperatures, and invents conversations. With PyTorch and flash attention, thousands of rows
at a time, several times as fast on a CUDA card as `ssd distill` generates texts by itself.
Llama models only.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as fn
from prompts import Prompt, make_prompts
from reading import passage_prompt
from safetensors.torch import load_file
from tokenizers import Tokenizer

from launch.workers.chat_template import form_of
from orchestrator.text.tokenizer import TargetTokenizer
from services.distill.data import RowInfo, ShardInfo, Shards
from services.distill.generation import ANSWER, GIVEN, PADDING, USER

_LENGTH = 1024
"""Tokens of a row on disk."""
_TEMPERATURES = (0.0, 0.0, 0.3, 0.7, 0.7, 1.0)
"""Of the answers; most people sample at 0 or .7."""
_USER = 0.85
"""Temperature of invented prompts."""
_LOOK_EVERY = 32
"""Steps between two looks at which rows are finished."""


class Cache:
    """Keys and values of all layers, one position for all rows."""

    def __init__(self, layers: int, rows: int, heads: int, length: int, like: torch.Tensor) -> None:
        shape = (rows, heads, length, like.shape[0])
        self.keys = [like.new_empty(shape) for _ in range(layers)]
        self.values = [like.new_empty(shape) for _ in range(layers)]

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows only."""
        for kept in (self.keys, self.values):
            for layer, buffer in enumerate(kept):
                kept[layer] = buffer[rows]


class Llama:
    """A Llama's forward pass; what `mlx_lm.models.llama` computes."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        weights = {name: w.to(device, dtype) for name, w in weights.items()}
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.width: int = config["hidden_size"]
        self.size: int = config.get("head_dim") or self.width // self.heads
        self.vocabulary: int = config["vocab_size"]
        self._epsilon: float = config["rms_norm_eps"]
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = weights.get("lm_head.weight", self._embedding)
        self._norm = weights["model.norm.weight"]
        self._blocks = [_block(weights, f"model.layers.{i}.") for i in range(self.layers)]
        half = torch.arange(0, self.size, 2, device=device, dtype=torch.float32) / self.size
        angles = torch.outer(
            torch.arange(8192, device=device, dtype=torch.float32), config["rope_theta"] ** -half
        )
        self._cos, self._sin = angles.cos(), angles.sin()

    def cache(self, rows: int, length: int) -> Cache:
        """Room for `rows` sequences."""
        like = self._embedding.new_empty(self.size)
        return Cache(self.layers, rows, self.kv_heads, length, like)

    def logits(self, tokens: torch.Tensor, cache: Cache, start: int) -> torch.Tensor:
        """[rows, vocabulary] after tokens [rows, count] at `start`."""
        rows, count = tokens.shape
        x = fn.embedding(tokens, self._embedding)
        cos = self._cos[start : start + count, None]
        sin = self._sin[start : start + count, None]
        for layer, block in enumerate(self._blocks):
            h = fn.rms_norm(x, (self.width,), block["in"], self._epsilon)
            qkv = fn.linear(h, block["qkv"]).view(rows, count, -1, self.size)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
            end = start + count
            cache.keys[layer][:, :, start:end] = _rotate(k, cos, sin).transpose(1, 2)
            cache.values[layer][:, :, start:end] = v.transpose(1, 2)
            keys = cache.keys[layer][:, :, :end]
            values = cache.values[layer][:, :, :end]
            attended = self._attend(_rotate(q, cos, sin), keys, values, start)
            x = x + fn.linear(attended, block["out"])
            h = fn.rms_norm(x, (self.width,), block["post"], self._epsilon)
            gate, up = fn.linear(h, block["gate_up"]).chunk(2, dim=-1)
            x = x + fn.linear(fn.silu(gate) * up, block["down"])
        last = fn.rms_norm(x[:, -1], (self.width,), self._norm, self._epsilon)
        return fn.linear(last, self._head)

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
    ) -> torch.Tensor:
        """[rows, count, width]: one new token of each row, or the first ones."""
        rows, count = q.shape[:2]
        if count == 1:
            # The query heads of one KV head stand as positions, so that it is read once.
            grouped = q.view(rows, self.kv_heads, -1, self.size)
            return fn.scaled_dot_product_attention(grouped, keys, values).reshape(rows, 1, -1)
        if start:
            raise ValueError("only the first tokens are fed several at a time")
        repeat = self.heads // self.kv_heads
        keys, values = (part.repeat_interleave(repeat, dim=1) for part in (keys, values))
        out = fn.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True)
        return out.transpose(1, 2).reshape(rows, count, -1)


def _block(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    attention, mlp = f"{name}self_attn.", f"{name}mlp."
    return {
        "in": weights[f"{name}input_layernorm.weight"],
        "post": weights[f"{name}post_attention_layernorm.weight"],
        "qkv": torch.cat([weights[f"{attention}{part}_proj.weight"] for part in "qkv"]),
        "out": weights[f"{attention}o_proj.weight"],
        "gate_up": torch.cat([weights[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]),
        "down": weights[f"{mlp}down_proj.weight"],
    }


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class Batch(NamedTuple):
    """What is generated together."""

    given: list[list[int]]
    """Tokens that each row starts with."""
    temperatures: list[float]
    categories: list[str]
    length: int
    invents: bool = False
    """Whether the rows go on with the user's words, else with the answer."""


class Template(NamedTuple):
    """The chat template's tokens."""

    opening: list[int]
    turn: list[int]
    stops: list[int]
    user_tokens: int = 160


class Wanted(NamedTuple):
    """Which texts."""

    slots: int
    """Positions of a batch: rows times length."""
    answer: int
    """Tokens that there is room for behind the longest prompt of a batch."""
    invented: float
    """Share of the rows whose prompt the target invents."""

    def room(self, prompt: int) -> int:
        """Tokens of a row whose prompt has so many."""
        return min(_LENGTH, -(-(prompt + self.answer) // 64) * 64)


class _Rows:
    """The rows of a batch that are not finished."""

    def __init__(self, batch: Batch, template: Template, device: str) -> None:
        count = len(batch.given)
        given = np.full((count, batch.length), -1, np.int64)
        for row, tokens in enumerate(batch.given):
            given[row, : len(tokens)] = tokens
        self.given = torch.from_numpy(given).to(device)
        self.place = torch.arange(count, device=device)
        self.temperature = torch.tensor(batch.temperatures, device=device)[:, None]
        self.phase = torch.full((count,), 0 if batch.invents else len(template.turn), device=device)
        self._turn = torch.tensor(template.turn, device=device)
        self._stops = torch.tensor(template.stops, device=device)
        self.answering = len(template.turn)
        self.done = self.answering + 1
        self._user_ends = min(map(len, batch.given)) + template.user_tokens

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these."""
        for name in ("given", "place", "temperature", "phase"):
            setattr(self, name, getattr(self, name)[rows])

    def choose(self, logits: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens at `position` and their kinds."""
        phase = self.phase
        temperature = torch.where((phase == 0)[:, None], _USER, self.temperature)
        scores = logits.float()
        noise = torch.empty_like(scores).exponential_().clamp_min_(1e-30).log_().neg_()
        sampled = scores.add_(noise.mul_(temperature)).argmax(-1)
        given = self.given[:, position]
        is_given = given >= 0
        answering, inventing = phase == self.answering, phase == 0
        stops = (sampled[:, None] == self._stops).any(-1)
        ends = inventing & (stops | (sampled == self._turn[0]) | (position >= self._user_ends))
        in_turn = (phase > 0) & (phase < self.answering)
        turned = self._turn[phase.clamp(max=self.answering - 1)]
        is_done = phase == self.done
        token = torch.where(ends, self._turn[0], torch.where(in_turn, turned, sampled))
        token = torch.where(is_given, given, torch.where(is_done, 0, token))
        kind = torch.where(answering, ANSWER, torch.where(is_done, PADDING, USER))
        kind = torch.where(is_given | ends | in_turn, GIVEN, kind)
        moved = torch.where(ends | in_turn, phase + 1, phase)
        moved = torch.where(answering & stops, self.done, moved)
        self.phase = torch.where(is_given, phase, moved)
        return token, kind


@torch.inference_mode()
def generate(model: Llama, batch: Batch, template: Template, device: str) -> tuple[Any, Any]:
    """Tokens and kinds, both [rows, length]."""
    rows = _Rows(batch, template, device)
    shape = (len(batch.given), batch.length)
    tokens = torch.zeros(shape, dtype=torch.int32, device=device)
    kinds = torch.zeros(shape, dtype=torch.uint8, device=device)
    cache = model.cache(len(batch.given), batch.length)
    common = min(map(len, batch.given))
    tokens[:, :common], kinds[:, :common] = rows.given[:, :common].int(), GIVEN
    fed, start = rows.given[:, :common], 0
    for position in range(common, batch.length):
        token, kind = rows.choose(model.logits(fed, cache, start), position)
        tokens[rows.place, position] = token.int()
        kinds[rows.place, position] = kind.to(torch.uint8)
        fed, start = token[:, None], position
        if position % _LOOK_EVERY == 0:
            left = (rows.phase != rows.done).nonzero()[:, 0]
            if not len(left):
                break
            if len(left) < 0.75 * len(rows.phase):
                rows.keep(left)
                cache.keep(left)
                fed = fed[left]
    return tokens.cpu().numpy(), kinds.cpu().numpy()


class Writer:
    """From prompts to shards."""

    def __init__(self, target: Path, device: str, seed: int, wanted: Wanted) -> None:
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.model = Llama(target, device, dtype)
        known = TargetTokenizer(target)
        form = form_of(known)
        self.template = Template(form.opening, form.turn, sorted(known.stop_ids))
        self._tokenizer: Any = Tokenizer.from_file(str(target / "tokenizer.json"))
        self._device = device
        self._seed = seed
        self._wanted = wanted

    def encode(self, prompts: list[str]) -> list[list[int]]:
        """Through the chat template, up to the assistant's first token."""
        opening, turn = self.template.opening, self.template.turn
        encoded = self._tokenizer.encode_batch(prompts, add_special_tokens=False)
        return [[*opening, *one.ids, *turn] for one in encoded]

    def passages(self, count: int) -> list[str]:
        """What the target writes about our topics."""
        r = random.Random(self._seed)  # noqa: S311  # not for secrets
        given = self.encode([passage_prompt(r) for _ in range(count)])
        longest = max(map(len, given))
        batch = Batch(given, [0.8] * count, [""] * count, longest + 224)
        tokens, kinds = generate(self.model, batch, self.template, self._device)
        stops = set(self.template.stops)
        texts = []
        for row, kind in zip(tokens, kinds, strict=True):
            ids = [int(token) for token in row[kind == ANSWER] if int(token) not in stops]
            text = self._tokenizer.decode(ids).strip()
            # What was cut ends with a sentence.
            texts.append(text[: max(text.rfind(". "), text.rfind(".\n")) + 1] or text)
        return [text for text in texts if 150 < len(text) < 900]

    def batches(self, prompts: list[Prompt]) -> list[Batch]:
        """Prompts of similar length together, and invented ones; in an order of chance."""
        wanted = self._wanted
        r = random.Random(self._seed + 1)  # noqa: S311  # not for secrets
        rows = list(zip(self.encode([p.prompt for p in prompts]), prompts, strict=True))
        rows = sorted(
            (row for row in rows if len(row[0]) < _LENGTH - 96), key=lambda row: len(row[0])
        )
        found = []
        while rows:
            size = wanted.slots // wanted.room(len(rows[0][0]))
            size = wanted.slots // wanted.room(len(rows[min(size, len(rows)) - 1][0]))
            part, rows = rows[:size], rows[size:]
            chosen = [r.choice(_TEMPERATURES) for _ in part]
            given = [tokens for tokens, _ in part]
            names = [prompt.category for _, prompt in part]
            found.append(Batch(given, chosen, names, wanted.room(len(part[-1][0]))))
        length = wanted.room(len(self.template.opening) + self.template.user_tokens)
        count = wanted.slots // length
        share = wanted.invented / (1 - wanted.invented)
        for _ in range(round(share * len(prompts) / count + 0.5)):
            chosen = [r.choice(_TEMPERATURES) for _ in range(count)]
            given = [list(self.template.opening)] * count
            found.append(Batch(given, chosen, ["invented"] * count, length, invents=True))
        r.shuffle(found)
        return found

    def write(self, batches: list[Batch], out: Path, until: float) -> None:
        """One shard a batch, until the time is over."""
        shards, first = Shards(out / "data"), 0
        last_s = 0.0
        for number, batch in enumerate(batches):
            if number and time.monotonic() + last_s / 2 > until:
                break
            torch.manual_seed(1000 * self._seed + number)
            started = time.monotonic()
            tokens, kinds = generate(self.model, batch, self.template, self._device)
            last_s = time.monotonic() - started
            missing = ((0, 0), (0, _LENGTH - batch.length))
            # Groups are held out in fours; every row is a prompt of its own.
            described = zip(batch.temperatures, batch.categories, strict=True)
            infos = [RowInfo(first + i, t, name) for i, (t, name) in enumerate(described)]
            first += len(infos)
            generated = int((kinds >= USER).sum())
            info = ShardInfo(infos, generated, last_s)
            shards.add(number, np.pad(tokens, missing), np.pad(kinds, missing), info)
            print(
                f"{number + 1} of {len(batches)}: {len(infos)} x {batch.length}, "
                f"{batch.categories[0]}, {generated} tokens, {last_s:.1f} s",
                flush=True,
            )


def main() -> None:
    """Write the texts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=60_000)
    parser.add_argument("--passages", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=2_097_152)
    parser.add_argument("--answer", type=int, default=320)
    parser.add_argument("--invented", type=float, default=0.2)
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    until = time.monotonic() + flags.seconds
    wanted = Wanted(flags.slots, flags.answer, flags.invented)
    writer = Writer(flags.target, flags.device, flags.seed, wanted)
    passages = writer.passages(flags.passages)
    print(f"{len(passages)} passages, {until - time.monotonic():.0f} s left", flush=True)
    prompts = make_prompts(flags.prompts, passages, flags.seed)
    batches = writer.batches(prompts)
    print(f"{len(batches)} batches, {until - time.monotonic():.0f} s left", flush=True)
    writer.write(batches, flags.out, until)


if __name__ == "__main__":
    main()
