"""`python texts.py TARGET OUT --seconds N --seed S`: texts for `train.py` and `ssd distill --texts`.

The target writes passages and files, answers prompts of many kinds (`prompts.py`) at four
temperatures, and invents conversations. With PyTorch and Triton on a CUDA card (`decoding.py`),
several times as fast as `ssd distill` generates texts by itself; `--device cpu` needs no Triton.
Llama and Qwen 2 only, in floats or MLX's 4 and 8 bits.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from corpus import read_corpus
from decoding import Model, Row, Rows, Template, Written, write
from openers import opener
from prompts import Prompt, Sources, make_prompts
from reading import passage_prompt
from tasks import Conversation, code_of, file_prompt
from tokenizers import Tokenizer

from launch.workers.chat_template import form_of
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.errors import UsageError
from protocol.messages import ChatMessage
from services.distill.data import ANSWER, USER, RowInfo, ShardInfo, Shards

_TEMPERATURES = (0.0, 0.0, 0.3, 0.7, 0.7, 1.0)
"""Of the answers; most people sample at 0 or .7."""
_GROUP = 64
"""Rows that begin together: their prompts are of similar length and fed in one pass."""
_SHARD = 8192
"""Rows of a file."""
_OPENED = 0.8
"""Share of the invented requests whose first words are given."""
_TOP = 16
"""Likeliest tokens that are kept of each distribution."""


class Wanted(NamedTuple):
    """Which texts."""

    slots: int
    """Rows at a time."""
    length: int
    """Tokens of a row at most."""
    answer: int
    """Tokens of an answer at most."""
    invented: float
    """Share of the rows whose prompt the target invents."""


class Writer:
    """From prompts to shards."""

    def __init__(self, target: Path, device: str, seed: int, wanted: Wanted) -> None:
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self._chat = TargetTokenizer(target)
        form = form_of(self._chat)
        self.template = Template(form.opening, form.turn, sorted(self._chat.stop_ids))
        self._tokenizer: Any = Tokenizer.from_file(str(target / "tokenizer.json"))
        self._seed = seed
        self._wanted = wanted
        model = Model(target, device, dtype)
        self._rows = Rows(model, self.template, wanted.slots, wanted.length, seed, _TOP)

    @property
    def has_tools(self) -> bool:
        """True if the chat template knows tools."""
        try:
            self._conversation(Conversation([{"role": "user", "content": "a"}], [{"name": "b"}]))
        except UsageError:
            return False
        return True

    def encode(self, prompts: list[str]) -> list[list[int]]:
        """Through the chat template, up to the assistant's first token."""
        opening, turn = self.template.opening, self.template.turn
        encoded = self._tokenizer.encode_batch(prompts, add_special_tokens=False)
        return [[*opening, *one.ids, *turn] for one in encoded]

    def _conversation(self, one: Conversation) -> list[int]:
        """As the server renders it."""
        return self._chat.encode([ChatMessage(**m) for m in one.messages], one.tools)

    def sources(self, count: int, given: Sources) -> Sources:
        """What is read: the given texts, passages that the target writes, half as many files."""
        r = random.Random(self._seed)  # noqa: S311  # not for secrets
        prompts = [(passage_prompt(r), "passage", 224) for _ in range(count)]
        prompts += [(file_prompt(r), "file", 448) for _ in range(count // 2)]
        encoded = self.encode([prompt for prompt, _, _ in prompts])
        rows = [
            Row(tokens, 0.8, kind, longest)
            for tokens, (_, kind, longest) in zip(encoded, prompts, strict=True)
        ]
        stops = set(self.template.stops)
        passages, files = [], []
        for written in write(self._rows, iter(_group(rows, r)), lambda: True):
            answer = written.tokens[written.kinds == ANSWER]
            text = self._tokenizer.decode([int(t) for t in answer if int(t) not in stops]).strip()
            if written.row.category == "file":
                files.append(code_of(text))
                continue
            # What was cut ends with a sentence.
            passages.append(text[: max(text.rfind(". "), text.rfind(".\n")) + 1] or text)
        return Sources(
            [*given.passages, *(text for text in passages if 150 < len(text) < 900)],
            [*given.files, *(file for file in files if file is not None)],
        )

    def groups(self, prompts: list[Prompt]) -> list[list[Row]]:
        """Prompts of similar length together, and invented ones; in an order of chance."""
        wanted = self._wanted
        r = random.Random(self._seed + 1)  # noqa: S311  # not for secrets
        plain = iter(self.encode([p.prompt for p in prompts if isinstance(p.prompt, str)]))
        encoded = (
            (next(plain) if isinstance(p.prompt, str) else self._conversation(p.prompt), p.category)
            for p in prompts
        )
        rows = [
            Row(given, r.choice(_TEMPERATURES), category, wanted.answer)
            for given, category in encoded
            if len(given) < wanted.length - 96
        ]
        share = wanted.invented / (1 - wanted.invented)
        invented = list(self._invented(r, round(share * len(rows))))
        found = [*_group(rows, r), *_group(invented, r)]
        r.shuffle(found)
        return found

    def _invented(self, r: random.Random, count: int) -> Iterator[Row]:
        """Rows whose request the target writes, of four out of five after its first words."""
        words = [opener(r) if r.random() < _OPENED else ("", "any") for _ in range(count)]
        given = self._tokenizer.encode_batch([text for text, _ in words], add_special_tokens=False)
        for one, (_, kind) in zip(given, words, strict=True):
            tokens = [*self.template.opening, *one.ids]
            heat = r.choice(_TEMPERATURES)
            yield Row(tokens, heat, f"invented {kind}", self._wanted.answer, invents=True)

    def write(self, groups: Iterator[list[Row]], out: Path, until: float) -> None:
        """Shards of finished rows, until the time is over."""
        shelf = _Shelf(out)
        for written in write(self._rows, groups, lambda: time.monotonic() < until):
            shelf.add(written)
        shelf.store()


class _Shelf:
    """Finished rows, in shards."""

    def __init__(self, out: Path) -> None:
        self._shards, self._rows = Shards(out / "data"), list[Written]()
        self._out = out / "data"
        self._number = self._first = self._answered = 0
        self._began = self._last = time.monotonic()

    def add(self, row: Written) -> None:
        self._rows.append(row)
        if len(self._rows) == _SHARD:
            self.store()

    def store(self) -> None:
        """Write a shard of what there is, and say how far it is."""
        if not self._rows:
            return
        infos = [  # Groups are held out in fours; every row is a prompt of its own.
            RowInfo(self._first + i, one.row.temperature, one.row.category)
            for i, one in enumerate(self._rows)
        ]
        tokens = np.stack([one.tokens for one in self._rows])
        kinds = np.stack([one.kinds for one in self._rows])
        self._store_top(kinds)
        now, generated = time.monotonic(), int((kinds >= USER).sum())
        self._shards.add(self._number, tokens, kinds, ShardInfo(infos, generated, now - self._last))
        self._first, self._number = self._first + len(infos), self._number + 1
        self._last, self._rows = now, []
        self._answered += int((kinds == ANSWER).sum())
        rate = self._answered / (now - self._began)
        print(
            f"{self._first} rows, {self._answered} tokens of answers, {rate:.0f} a second",
            flush=True,
        )

    def _store_top(self, kinds: Any) -> None:
        """Write the distributions that answers were drawn from, row by row."""
        self._out.mkdir(parents=True, exist_ok=True)
        drawn = [np.flatnonzero(row[1:] == ANSWER) for row in kinds]
        for name in ("top_ids", "top_logs"):
            parts = [getattr(one, name)[at] for one, at in zip(self._rows, drawn, strict=True)]
            np.save(self._out / f"shard-{self._number:05d}.{name}.npy", np.concatenate(parts))


def _group(rows: list[Row], r: random.Random) -> list[list[Row]]:
    """Rows of similar length together, in an order of chance."""
    rows = sorted(rows, key=lambda row: len(row.given))
    groups = [rows[at : at + _GROUP] for at in range(0, len(rows), _GROUP)]
    r.shuffle(groups)
    return groups


def main() -> None:
    """Write the texts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=200_000)
    parser.add_argument("--corpus", type=Path, help="JSON lines, see corpus.py")
    parser.add_argument("--passages", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=320)
    parser.add_argument("--invented", type=float, default=0.2)
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    until = time.monotonic() + flags.seconds
    wanted = Wanted(flags.slots, flags.length, flags.answer, flags.invented)
    writer = Writer(flags.target, flags.device, flags.seed, wanted)
    corpus = read_corpus(flags.corpus)
    sources = writer.sources(flags.passages, corpus.sources)
    read = f"{len(sources.passages)} passages and {len(sources.files)} files"
    print(f"{read}, {until - time.monotonic():.0f} s left", flush=True)
    prompts = make_prompts(flags.prompts, sources, flags.seed, has_tools=writer.has_tools)
    groups = writer.groups([*prompts, *corpus.prompts])
    print(f"{len(groups)} groups, {until - time.monotonic():.0f} s left", flush=True)
    writer.write(iter(groups), flags.out, until)


if __name__ == "__main__":
    main()
