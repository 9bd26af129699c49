"""`python -m tests.tools.agents_load URL MODEL`: what coding agents ask of a server, measured.

Each agent begins with the same text of about 6,000 tokens, appends to it for 20 turns, asks for
a title every fifth turn, in the background, and returns to turn 5 three times to go on in
another way. The server is any that speaks OpenAI's chat API: `ssd serve`,
`python -m services.tools.mlx_lm_server`, or llama.cpp's.

`python -m tests.tools.agents_load --compare NAME=FILE ...` puts saved runs side by side.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import openai

_TITLE = "Give this conversation a title of at most five words."
_FORK_AT = 4
"""The branches leave after the fifth turn."""
_TOKENS_PER_WORD = 1.74
"""Of the beginning, as the default target's tokenizer cuts it."""


@dataclass
class Turn:
    """One answer as its client saw it."""

    label: str
    """`turn 1`, `title 5` (after turn 5), `branch 1`."""
    ttft_s: float
    tok_s: float
    """Those after the first chunk, by the server's own count."""
    prompt_tokens: int
    cached_tokens: int

    @property
    def kind(self) -> str:
        """Its label without the number."""
        return self.label.split()[0]


@dataclass
class Agent:
    """One client and its conversation."""

    client: openai.OpenAI
    model: str
    number: int
    max_tokens: int
    beginning: str
    turns: list[Turn] = field(default_factory=list)

    def run(self, turns: int, branches: int) -> None:
        """The whole conversation, its branches, and titles in between."""
        history: list[Any] = [{"role": "system", "content": self.beginning}]
        fork: list[Any] = history
        for turn in range(turns):
            asked = f"Step {turn + 1} of agent {self.number}: go on."
            history = self._ask(history, asked, f"turn {turn + 1}")
            if turn == min(_FORK_AT, turns - 1):
                fork = history
            if turn % 5 == 4:
                self._ask(history, _TITLE, f"title {turn + 1}")
        for branch in range(1, branches + 1):
            self._ask(fork, f"Forget that. Variant {branch}: go on.", f"branch {branch}")

    def _ask(self, history: list[Any], text: str, label: str) -> list[Any]:
        messages = [*history, {"role": "user", "content": text}]
        is_title = label.startswith("title")
        headers = {"X-Priority": "background"} if is_title else None
        started = time.perf_counter()
        stream = self.client.chat.completions.create(
            model=self.model, messages=messages, temperature=0, stream=True,
            max_tokens=12 if is_title else self.max_tokens,
            stream_options={"include_usage": True}, extra_headers=headers,
        )  # fmt: skip
        times: list[float] = []
        said, usage = "", None
        for chunk in stream:
            usage = chunk.usage or usage
            content = chunk.choices[0].delta.content if chunk.choices else None
            if content:
                times.append(time.perf_counter())
                said += content
        details = usage.prompt_tokens_details if usage is not None else None
        tokens = usage.completion_tokens if usage is not None else len(times)
        self.turns.append(
            Turn(
                label=label,
                ttft_s=(times[0] if times else time.perf_counter()) - started,
                tok_s=(tokens - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0,
                prompt_tokens=usage.prompt_tokens if usage is not None else 0,
                cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
            )
        )
        return [*messages, {"role": "assistant", "content": said or "(nothing)"}]


def write_beginning(tokens: int) -> str:
    """Instructions and descriptions of tools, as agents send them; the same in every run."""
    words = round(tokens / _TOKENS_PER_WORD)
    tools = (
        f"Tool {n}: reads file number {n} of the project and returns its lines {n} to {n + 9}. "
        for n in range(words // 15 + 1)
    )
    text = "You are a careful programmer. You have these tools. " + "".join(tools)
    return " ".join(text.split()[:words])


def run_agents(options: argparse.Namespace) -> dict[str, Any]:
    """All agents at the same time; their turns, and the seconds that all of it took.

    Raises:
        RuntimeError: a request was not answered.
    """
    beginning = write_beginning(options.beginning)
    with openai.OpenAI(
        base_url=f"{options.url.rstrip('/')}/v1", api_key="none", max_retries=0, timeout=3600
    ) as client:
        agents = [
            Agent(client, options.model, number, options.max_tokens, beginning)
            for number in range(1, options.agents + 1)
        ]
        # The server may have to load its model first.
        hello: list[Any] = [{"role": "user", "content": "Hello."}]
        client.chat.completions.create(model=options.model, messages=hello, max_tokens=1)
        threads = [
            threading.Thread(target=agent.run, args=(options.turns, options.branches))
            for agent in agents
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
    turns = [asdict(turn) for agent in agents for turn in agent.turns]
    expected = options.agents * (options.turns + options.branches + options.turns // 5)
    if len(turns) != expected:
        raise RuntimeError(f"{len(turns)} of {expected} requests were answered")
    return {"seconds": round(seconds, 1), "agents": options.agents, "turns": turns}


# ---------------------------------------------------------------- figures


_PLURALS = {"turn": "turns from 2", "title": "titles", "branch": "branches"}


def tabulate(runs: dict[str, dict[str, Any]]) -> str:
    """A Markdown table: a row for each request, medians over agents, three columns a run."""
    heads = [f"{name}: TTFT s | {name}: cached | {name}: tok/s" for name in runs]
    lines = [f"| request | {' | '.join(heads)} |", "|---|" + "---|" * (3 * len(runs))]
    read = {name: [Turn(**turn) for turn in run["turns"]] for name, run in runs.items()}
    labels = dict.fromkeys(turn.label for turns in read.values() for turn in turns)
    for label in labels:
        cells = [_cells([t for t in turns if t.label == label]) for turns in read.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    for kind in dict.fromkeys(label.split()[0] for label in labels):
        later = [
            _cells([t for t in turns if t.kind == kind and t.label != "turn 1"])
            for turns in read.values()
        ]
        lines.append(f"| **{_PLURALS[kind]}** | {' | '.join(later)} |")
    took = " | ".join(f"{run['seconds']:.0f} s | | " for run in runs.values())
    lines.append(f"| the whole | {took} |")
    return "\n".join(lines)


def _cells(turns: list[Turn]) -> str:
    if not turns:
        return "| | "
    prompt = sum(turn.prompt_tokens for turn in turns)
    cached = sum(turn.cached_tokens for turn in turns)
    ttft = statistics.median(turn.ttft_s for turn in turns)
    share = f"{cached // len(turns)} of {prompt // len(turns)}" if prompt else "?"
    return f"{ttft:.2f} | {share} | {statistics.median(turn.tok_s for turn in turns):.1f}"


def main() -> int:
    """Run the load, or compare saved runs; the table goes to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--name", default="server", help="of the server in the table")
    parser.add_argument("--agents", type=int, default=1, help="how many at the same time")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--beginning", type=int, default=6000, help="its tokens, about")
    parser.add_argument("--json", type=Path, help="every request, into this file")
    parser.add_argument("--compare", nargs="+", metavar="NAME=FILE", help="print saved runs")
    options = parser.parse_args()
    if options.compare:
        named = dict(pair.split("=", 1) for pair in options.compare)
        runs = {name: json.loads(Path(file).read_text()) for name, file in named.items()}
    elif options.url:
        runs = {options.name: run_agents(options)}
        if options.json is not None:
            options.json.write_text(json.dumps(runs[options.name], indent=1) + "\n")
    else:
        parser.error("give the server's URL, or --compare")
    sys.stdout.write(tabulate(runs) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
