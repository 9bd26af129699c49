"""Our CPU kernels and llama.cpp, interleaved on one machine: speeds, rows, memory, ready times.

    PYTHONPATH=. python docs/lab/cpu.py --llama DIR --model NAME=FOLDER,FILE.gguf [--model ...]
        [--rows NAME] [--minutes 12] [--rounds 3]

DIR holds llama-batched-bench and llama-server. FOLDER is what the GGUF file was converted into.
Both programs run their passes without choosing tokens; only the last table goes over HTTP. Each
cell is the median of the rounds that fit into the time; a 4k prompt is read once. Prints Markdown.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PROMPTS = (128, 1024, 4096)
ROWS = (1, 2, 4, 8)
STREAMS = (2, 4, 8)
STREAM_TOKENS = 48
STEPS = 32
READY_S = 120.0
LAST_S = 60.0
"""What began in time may take that long."""
ANSWER_TOKENS = 160
CODE = "\n".join(
    f"def read_{name}(path):\n    with open(path) as file:\n        return {name}(file.read())\n"
    for name in ("int", "float", "str", "list", "set", "tuple")
)
EDIT = f"Rename the parameter path to name in this file, and print the whole file:\n\n{CODE}"

Cells = dict[tuple[str, str, str], list[float]]
"""(model, what, program) -> a figure of each round."""


class Model(NamedTuple):
    """One model in both forms."""

    name: str
    folder: str
    gguf: str


# ---------------------------------------------------------------- our passes, in a process


def compute(folder: str, threads: int) -> None:
    """Answer lines `prompt tokens steps` and `rows n steps` with seconds, until the input ends."""
    from services.kernels.cpu.library import load_blas  # noqa: PLC0415  # before MLX

    load_blas(threads)
    import mlx.core as mx  # noqa: PLC0415

    mx.set_default_device(mx.cpu)
    from services.kernels.cpu.decoder import fill_only, kernel_of  # noqa: PLC0415
    from services.kernels.cpu.equip import equip, takes  # noqa: PLC0415
    from services.kv.cache import KVStore  # noqa: PLC0415
    from services.mlx.loader import load, windows_of  # noqa: PLC0415

    module = load(Path(folder), as_stored=takes).module
    if not equip(module) or kernel_of(module) is None:
        raise SystemExit(f"the CPU kernels do not compute {folder!r}")

    def run(store: KVStore, tokens: list[int]) -> None:
        store.chain(len(tokens))
        module(mx.array([tokens]), cache=store.caches)

    for line in sys.stdin:
        what, first, second = line.split()
        store = KVStore(windows_of(module), bucketed=False)
        times = []
        began = time.perf_counter()
        if what == "prompt":
            store.chain(int(first) - 1)
            fill_only(module)(mx.array([[7] * (int(first) - 1)]), cache=store.caches)
            run(store, [7])
        else:
            run(store, [7] * 16)
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(int(second)):
            run(store, [7] * (1 if what == "prompt" else int(first)))
        times.append((time.perf_counter() - began) / int(second))
        memory = Path("/proc/self/status").read_text(encoding="utf-8")
        peak = re.search(r"VmHWM:\s+(\d+)", memory)
        print(json.dumps([*times, int(peak[1]) / 1024 if peak else 0.0]), flush=True)


class Ours:
    """A process of ours with one model."""

    def __init__(self, model: Model, threads: int) -> None:
        command = [sys.executable, __file__, "--compute", model.folder, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *question: Any) -> list[float]:
        """Seconds of a prompt, seconds a step, and the process's peak memory in MiB."""
        if self._process.stdin is None or self._process.stdout is None:
            raise SystemExit("our process has no pipes")
        self._process.stdin.write(" ".join(map(str, question)) + "\n")
        self._process.stdin.flush()
        answer: list[float] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


# ---------------------------------------------------------------- llama.cpp


def llama(bench: Path, model: Model, threads: int, prompt: int, rows: str) -> tuple[Any, float]:
    """The rows of llama-batched-bench, and its peak memory in MiB."""
    size = prompt * len(rows.split(",")) + 16 * STEPS + 4096
    command = [
        *(str(bench), "-m", model.gguf, "-c", str(size), "-npp", str(prompt), "-ntg", str(STEPS)),
        *("-npl", rows, "-t", str(threads), "--output-format", "jsonl"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if process.stdout is None:
        raise SystemExit("llama-batched-bench has no output")
    output = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if status or not lines:
        raise SystemExit(f"llama-batched-bench ended with {status}: {' '.join(command)}")
    return lines, usage.ru_maxrss / 1024


# ---------------------------------------------------------------- rounds


def run_passes(given: argparse.Namespace, models: list[Model], cells: Cells, end: float) -> None:
    """Add the figures of all rounds that begin before `end`."""
    bench = Path(given.llama) / "llama-batched-bench"
    ours = {(model, threads): Ours(model, threads) for model in models for threads in (1, 2)}
    for turn in range(given.rounds):
        for model in models:
            for threads in (2, 1):
                for prompt in PROMPTS if threads == 2 else PROMPTS[:1]:
                    if time.monotonic() < end and (turn == 0 or prompt < PROMPTS[-1]):
                        run_prompt(bench, model, threads, prompt, ours[model, threads], cells)
                if model.name == given.rows and time.monotonic() < end:
                    run_rows(bench, model, threads, ours[model, threads], cells)
    for process in ours.values():
        process.end()


def run_prompt(
    bench: Path, model: Model, threads: int, prompt: int, process: Ours, cells: Cells
) -> None:
    """Read a prompt and decode behind it, by both."""
    seconds, step, peak = process.ask("prompt", prompt, STEPS)
    [theirs], their_peak = llama(bench, model, threads, prompt, "1")
    where = f", {threads} thread{'s' * (threads > 1)}"
    for what, mine, other in (
        (f"prompt of {prompt}, tok/s{where}", prompt / seconds, theirs["speed_pp"]),
        (f"decoding after {prompt}, tok/s{where}", 1 / step, theirs["speed_tg"]),
        (f"peak memory after {prompt}, MiB{where}", peak, their_peak),
    ):
        cells[model.name, what, "ssd"].append(mine)
        cells[model.name, what, "llama.cpp"].append(other)


def run_rows(bench: Path, model: Model, threads: int, process: Ours, cells: Cells) -> None:
    """Passes over several rows: of one sequence here, of several there."""
    lines, _ = llama(bench, model, threads, 16, ",".join(map(str, ROWS)))
    for rows, line in zip(ROWS, lines, strict=True):
        what = f"T_v({rows}), ms, {threads} thread{'s' * (threads > 1)}"
        cells[model.name, what, "ssd"].append(1e3 * process.ask("rows", rows, STEPS // 2)[1])
        cells[model.name, what, "llama.cpp"].append(1e3 * line["t_tg"] / STEPS)


# ---------------------------------------------------------------- servers


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int) -> Iterator[float]:
    """A server, and the seconds until it was ready."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(port):
            if process.poll() is not None or time.perf_counter() - began > READY_S:
                raise SystemExit(f"not ready: {' '.join(command)}")
            time.sleep(0.02)
        yield time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


def is_ready(port: int) -> bool:
    """Whether /health says so."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def chat(port: int, text: str, max_tokens: int, **more: Any) -> Any:
    """The body of a greedy answer."""
    message = {"role": "user", "content": text}
    body = {"messages": [message], "max_tokens": max_tokens, "temperature": 0, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310  # of this machine
        return json.load(answer)


def decode(port: int, **more: Any) -> float:
    """Tokens per second of the edit's answer."""
    speed: float = chat(port, EDIT, ANSWER_TOKENS, **more)["timings"]["predicted_per_second"]
    return speed


def throughput(port: int, streams: int) -> float:
    """Tokens per second of concurrent answers, prompts included."""
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        questions = [f"Tell a story of {number} dwarfs." for number in range(2, 2 + streams)]
        answers = list(pool.map(lambda text: chat(port, text, STREAM_TOKENS), questions))
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return float(tokens) / (time.perf_counter() - began)


def run_servers(given: argparse.Namespace, model: Model, cells: Cells) -> None:
    """Ready times, an edit (plain and with lookups), and streams, of both in turns."""
    ours, theirs = free_port(), free_port()
    ssd = "import sys; from launch.cli import main; sys.argv[0] = 'ssd'; main()"
    our_command = [
        *(sys.executable, "-c", ssd, "serve", "--model", model.folder, "--port", str(ours)),
        *("--draft-backend", "ngram", "--name", f"lab-{ours}"),
    ]
    server = str(Path(given.llama) / "llama-server")
    their_command = [
        *(server, "-m", model.gguf, "--port", str(theirs)),
        *("-c", str(2048 * max(STREAMS)), "-np", str(max(STREAMS))),
    ]
    with serving(our_command, ours) as our_ready, serving(their_command, theirs) as their_ready:
        cells[model.name, "ready after, s", "ssd"].append(our_ready)
        cells[model.name, "ready after, s", "llama.cpp"].append(their_ready)
        for _ in range(given.rounds):
            cells[model.name, "edit, tok/s", "ssd, plain"].append(decode(ours, num_draft_tokens=0))
            for port, program in ((ours, "ssd"), (theirs, "llama.cpp")):
                cells[model.name, "edit, tok/s", program].append(decode(port))
                for streams in STREAMS:
                    what = f"{streams} streams over HTTP, tok/s"
                    cells[model.name, what, program].append(throughput(port, streams))


def print_table(cells: Cells) -> None:
    """All figures in the order in which they came."""
    medians = {cell: statistics.median(figures) for cell, figures in cells.items()}
    print("| model | | ssd | llama.cpp | ssd / llama.cpp | rounds |\n|---|---|---|---|---|---|")
    for (model, what, program), figure in medians.items():
        if program != "ssd":
            continue
        other = medians.get((model, what, "llama.cpp"))
        their = ["-", "-"] if other is None else [f"{other:.1f}", f"{figure / other:.2f}"]
        rounds = len(cells[model, what, program])
        print(f"| {model} | {what} | {figure:.1f} | {their[0]} | {their[1]} | {rounds} |")
        plain = medians.get((model, what, "ssd, plain"))
        if plain is not None:
            print(f"| {model} | {what}, plain | {plain:.1f} | | {figure / plain:.2f} of plain | |")


def main() -> None:
    """Measure, and print the table."""
    if sys.argv[1:2] == ["--compute"]:
        compute(sys.argv[2], int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama", required=True)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--rows", default="")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    models = []
    for text in given.model:
        name, _, places = text.partition("=")
        folder, _, gguf = places.partition(",")
        models.append(Model(name, folder, gguf))
    cells: Cells = defaultdict(list)
    end = time.monotonic() + 60.0 * given.minutes - LAST_S
    for model in models:
        run_servers(given, model, cells)
    run_passes(given, models, cells, end)
    print_table(cells)


if __name__ == "__main__":
    main()
