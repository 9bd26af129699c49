"""Compare the speed of this checkout with another commit's: `python -m tests.tools.gate`.

Both trees run the same `ssd bench` and `ssd load` in turn, on the same machine, with the same
interpreter and models. Each repeat gives a ratio of each mode's speeds, all tokens over all
decoding time, and the comparison is the median of these: a machine that becomes faster or slower
meanwhile favours each tree in turn. A mode that loses more than 3 % fails the gate. One JSON line
per run is appended to `docs/lab/gate.jsonl`.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "docs" / "lab" / "gate.jsonl"
MAY_LOSE = 0.03
OWN = ("ar", "sd", "ssd")
"""Modes whose speed must not fall; mlx-lm is shown for scale only."""

Speeds = dict[str, float]
"""Column -> tokens per second."""


def main() -> int:
    """Run the comparison; return 1 if a mode of ours became slower."""
    given = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="ssd-gate-") as folder:
        old = Path(folder) / "old"
        git("worktree", "add", "--detach", "--force", str(old), given.old)
        try:
            runs = list(measure(given, old, Path(folder)))
        finally:
            git("worktree", "remove", "--force", str(old))
    ratios = compare(runs)
    report = summary(given, runs, ratios)
    with LEDGER.open("a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(report) + "\n")
    return show(runs, ratios)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare the speed of two commits.")
    parser.add_argument("--old", default="HEAD~1", help="commit to compare with")
    parser.add_argument("--old-flags", default="", help="flags that only the old commit knows")
    parser.add_argument("--flags", default="", help="flags of both, such as --target-device")
    parser.add_argument("--modes", default="mlx-lm,ar,sd,ssd")
    parser.add_argument("--streams", default="4", help="streams of `ssd load`; empty: none")
    parser.add_argument("--prompts", default=str(ROOT / "docs" / "lab" / "prompts.jsonl"))
    parser.add_argument("--limit", type=int, default=0, help="use only this many prompts")
    parser.add_argument("-m", "--max-tokens", type=int, default=64)
    parser.add_argument(
        "--repeats", type=int, default=4, help="even: each tree goes first as often"
    )
    return parser.parse_args()


def git(*words: str) -> str:
    """Run git in this checkout and return its output."""
    command = [shutil.which("git") or "git", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def measure(given: argparse.Namespace, old: Path, folder: Path) -> Iterator[dict[str, Speeds]]:
    """Yield the speeds of both trees, once per repeat; the order alternates."""
    trees = [("old", old), ("new", ROOT)]
    for repeat in range(given.repeats):
        speeds: dict[str, Speeds] = {}
        for name, tree in trees if repeat % 2 == 0 else trees[::-1]:
            flags = [*given.flags.split(), *(given.old_flags.split() if name == "old" else [])]
            speeds[name] = bench(given, tree, flags, folder) | load(given, tree, flags, folder)
            sys.stdout.write(f"{repeat + 1} {name}: {rounded(speeds[name])}\n")
            sys.stdout.flush()
        yield speeds


def bench(given: argparse.Namespace, tree: Path, flags: list[str], folder: Path) -> Speeds:
    """Measure one request at a time."""
    words = ["bench", "--prompts", given.prompts, "--limit", str(given.limit)]
    words += ["--modes", given.modes]
    runs = ssd(tree, [*words, *flags], given.max_tokens, folder)["runs"]
    return {
        mode: sum(run["tokens"] - 1 for run in runs if run["mode"] == mode)
        / sum(run["decode_s"] for run in runs if run["mode"] == mode)
        for mode in dict.fromkeys(run["mode"] for run in runs)
    }


def load(given: argparse.Namespace, tree: Path, flags: list[str], folder: Path) -> Speeds:
    """Measure several requests at once, by plain decoding and by speculation."""
    if not given.streams:
        return {}
    words = ["load", "--prompts", given.prompts, "--streams", given.streams, "--modes", "ar,ssd"]
    loads = ssd(tree, [*words, "--requests", "16", *flags], given.max_tokens, folder)
    return {
        f"{one['mode']}x{one['streams']}": sum(answer["tokens"] for answer in one["answers"])
        / one["seconds"]
        for one in loads
    }


def ssd(tree: Path, words: list[str], max_tokens: int, folder: Path) -> Any:
    """Run a command of the tree's `ssd`, and return what it wrote with `--json`."""
    out = folder / "out.json"
    program = "from launch.cli import main; main()"
    command = [sys.executable, "-c", program, *words, "-m", str(max_tokens), "--json", str(out)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text(encoding="utf-8"))


def compare(runs: list[dict[str, Speeds]]) -> Speeds:
    """Return the median over the repeats of the new tree's speed over the old one's, by column."""
    both = [column for column in runs[0]["new"] if column in runs[0]["old"]]
    return {
        column: median(run["new"][column] / run["old"][column] for run in runs) for column in both
    }


def summary(given: argparse.Namespace, runs: list[dict[str, Speeds]], ratios: Speeds) -> Any:
    """Return the ledger's line: what was compared, where, and the result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": processor(),
        "old": git("rev-parse", "--short", given.old),
        "new": git("describe", "--always", "--dirty"),
        "arguments": {name: value for name, value in vars(given).items() if value},
        "ratio": rounded(ratios, 3),
        "runs": [{name: rounded(speeds) for name, speeds in run.items()} for run in runs],
    }


def processor() -> str:
    """Name the processor, its widest vectors, and the cores in use."""
    text = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(": ")[1] for line in text.splitlines() if line.startswith("model name")]
    kinds = ("avx512_vnni", "avx512f", "avx2")
    vectors = next((kind for kind in kinds if kind in text), platform.machine())
    return f"{names[0] if names else platform.processor()}, {vectors}, {os.cpu_count()} cores"


def rounded(speeds: Speeds, digits: int = 1) -> Speeds:
    """Round all speeds."""
    return {column: round(speed, digits) for column, speed in speeds.items()}


def show(runs: list[dict[str, Speeds]], ratios: Speeds) -> int:
    """Print the medians of both trees and the ratios; return 1 if a mode of ours lost too much."""
    slower = []
    for column, ratio in ratios.items():
        old, new = (median(run[name][column] for run in runs) for name in ("old", "new"))
        sys.stdout.write(f"{column:>12} {old:8.1f} {new:8.1f} {ratio:6.3f}\n")
        if column.startswith(OWN) and ratio < 1 - MAY_LOSE:
            slower.append(column)
    if slower:
        sys.stdout.write(f"slower by more than {MAY_LOSE:.0%}: {', '.join(slower)}\n")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
