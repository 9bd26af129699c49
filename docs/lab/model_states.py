"""What it costs to verify a chain, and to go back, by the kind of state that a model has.

`python docs/lab/model_states.py`: models of random weights and a realistic shape, built with
mlx-lm's own classes and prepared as the verifier does. Per model and way, over a single token
with mlx-lm's own caches on the model as it was:

    stands      a chain of m tokens that stands in full
    rejected    the same chain of which one token stands, round after round: the difference is
                the price of a rejection
    ahead       one token, whose pass begins before the last one has been read

and for the window model (`--tables windows`) the memory and the speed at a long context, beside
slots for all tokens. Run it on an idle machine. `--device cpu` or `gpu`, `--models`, `--layers`
and `--context` make it smaller. Every figure is written when it is there; after `--minutes` (on
a GPU 3.5) what is not measured yet is left out, and each model gets its share of what is left.
"""

# ruff: noqa: E402  # the BLAS must be loaded before MLX

import argparse
import faulthandler
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from services.mlx.blas import load_blas

_STARTED = time.perf_counter()
load_blas(threads=1)  # before anything imports MLX

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from random_models import MODELS, build

from protocol.decoding.token_tree import read_tree
from services.engine.runner import ModelRunner
from services.kv.cache import KVStore
from services.kv.layered import LayeredState
from services.kv.slots import round_to_bucket
from services.kv.state import SequenceState
from services.mlx.loader import windows_of
from services.verifier.target_model import TargetModel, prepare

_PROMPT = 128
_CHUNK = 512
_LENGTHS = (1, 2, 3, 4, 6, 8)
_WARM_UP, _FEWEST, _CELL_S = 2, 3, 2.0
"""Rounds before those that count; how many of these there are at least, and for how long."""
_GPU_MINUTES, _GRACE_S = 3.5, 15.0
"""Limit on a GPU where none is given; what a single operation may take beyond a limit."""
_WINDOW_MODEL = "gemma3-like"
_SMALL = ("qwen3.5-like", "lfm2-like", "gemma3-like")


def ways_of(model: Any, target: TargetModel) -> Iterator[tuple[str, Callable[[], SequenceState]]]:
    """The way that is taken, and the universal one."""
    found = target.states
    yield found.way, found.make
    if found.way == "replay":
        yield (
            "refeed",
            lambda: LayeredState(
                lambda: make_prompt_cache(model), bucketed=target.bucketed, replay=None, own=True
            ),
        )


def fill(model: Any, state: SequenceState, tokens: int) -> None:
    """A prompt of so many tokens."""
    while state.length < tokens:
        count = min(_CHUNK, tokens - state.length)
        state.append(count, whole=True)
        model(mx.ones((1, count), mx.int32), cache=state.caches)
        state.commit(state.length)
        state.evaluate()


class OutOfTimeError(Exception):
    """The limit is reached."""


class Clock:
    """The time that is left: for everything, and for the model that is measured now."""

    def __init__(self, minutes: float) -> None:
        self._end = _STARTED + 60 * minutes
        self._now_end = self._end
        if math.isfinite(minutes):
            # Says where an operation hung that never came back.
            left = self._end - time.perf_counter() + _GRACE_S
            faulthandler.dump_traceback_later(max(1.0, left), exit=True)

    def share(self, parts: int) -> None:
        """From now on a part of what is left, of so many."""
        now = time.perf_counter()
        self._now_end = now + (self._end - now) / parts

    def check(self) -> None:
        """Raises OutOfTimeError if there is none left."""
        if time.perf_counter() > self._now_end:
            raise OutOfTimeError

    def median(self, turn: Callable[[], None], rounds: int) -> float:
        """Median milliseconds of a turn; fewer of them where they take long."""
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < _WARM_UP + rounds:
            self.check()
            started = time.perf_counter()
            turn()
            times.append(1e3 * (time.perf_counter() - started))
            if len(times) >= _WARM_UP + _FEWEST and time.perf_counter() - began > _CELL_S:
                break
        return statistics.median(times[_WARM_UP:])


def run_round(model: Any, state: SequenceState, length: int, keep: int) -> None:
    """A chain of which the first `keep` tokens stand."""
    base = state.length
    if state.owed > state.most_owed:  # as the verifier does
        owed = mx.ones((1, state.owed), mx.int32)
        state.append(0)
        model(owed, cache=state.caches)
        state.commit(base)
    row = mx.ones((1, state.owed + length), mx.int32)
    state.append(length)
    logits = model(row, cache=state.caches)
    mx.eval(mx.argmax(logits[0, -length:], axis=-1))
    state.commit(base + keep)


def run_ahead(model: Any, state: SequenceState) -> Callable[[], None]:
    """A turn of plain decoding as the verifier runs it where passes begin ahead."""
    runner, choice = ModelRunner(model), mx.ones((1,), mx.int32)

    def turn() -> None:
        nonlocal choice
        [step] = runner.run_ahead(choice, [state], [0])
        if not step.fill(read_tree([int(choice.item())], [])):
            raise RuntimeError("a pass was over another token")
        state.commit(state.length)
        choice = mx.argmax(step.logits, axis=-1)

    return turn


def run_reference(model: Any, *, ahead: bool) -> Callable[[], None]:
    """A turn of plain decoding with mlx-lm's own caches, as mlx-lm runs it."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.ones((1, _PROMPT), mx.int32), cache=caches))
    choice = mx.ones((1,), mx.int32)
    start: Any = mx.async_eval if ahead else mx.eval

    def turn() -> None:
        nonlocal choice
        before, choice = choice, mx.argmax(model(choice[None], cache=caches)[0], axis=-1)
        start(choice)
        before.item()

    return turn


def show(*cells: object) -> None:
    """A line of a table."""
    sys.stdout.write("| " + " | ".join(str(cell) for cell in cells) + " |\n")
    sys.stdout.flush()


def show_as_measured(label: str, cells: Iterator[str]) -> None:
    """A line of a table, each cell as soon as it is known."""
    sys.stdout.write(f"| {label} |")
    try:
        for cell in cells:
            sys.stdout.write(f" {cell} |")
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def compare_ways(name: str, layers: int, rounds: int, clock: Clock) -> None:
    """T_v(m) by each way, of chains that stand and of chains that are rejected."""
    model = build(name, layers)
    parameters: Any = tree_flatten(model.parameters())
    label = f"{name}, {sum(array.size for _, array in parameters) / 1e6:.0f} M"
    plain = clock.median(run_reference(model, ahead=False), rounds)
    ahead = clock.median(run_reference(model, ahead=True), rounds)
    show(f"{label}, mlx-lm", "", f"{ahead:.2f}", f"{plain:.2f}", *["" for _ in _LENGTHS])
    target = prepare(model, may_share_passes=False)
    for way, make in ways_of(model, target):
        state = make()
        fill(model, state, _PROMPT)
        for kind in ("stands", "rejected"):
            row = measure_way(model, state, rounds, clock, stands=kind == "stands")
            show_as_measured(f"{label}, {way} | {kind}", (cell(plain) for cell in row))


def measure_way(
    model: Any, state: SequenceState, rounds: int, clock: Clock, *, stands: bool
) -> Iterator[Callable[[float], str]]:
    """The cells of a row, given what a token costs in mlx-lm."""
    if stands:
        ahead = clock.median(run_ahead(model, state), rounds)
        yield lambda _: f"{ahead:.2f}"
    else:
        yield lambda _: ""
    for index, length in enumerate(_LENGTHS):
        keep = length if stands else 1
        ms = clock.median(lambda m=length, k=keep: run_round(model, state, m, k), rounds)
        if not index:
            yield lambda _, ms=ms: f"{ms:.2f}"
        yield lambda plain, ms=ms: f"{ms / plain:.2f}"


def hold(state: SequenceState, layers: int, tokens: int) -> None:
    """A context of so many tokens, whose keys and values are random: nothing is computed."""
    config = MODELS[_WINDOW_MODEL]
    heads, size = config["num_key_value_heads"], config["head_dim"]
    kind = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    shape = (1, heads, round_to_bucket(tokens), size)
    buffers = []
    for _ in range(layers):
        pair = (mx.random.normal(shape).astype(kind), mx.random.normal(shape).astype(kind))
        mx.eval(pair)
        buffers.append(pair)
    state.take(buffers, tokens)
    state.evaluate()


def compare_windows(layers: int, context: int, rounds: int, clock: Clock) -> None:
    """Memory and speed of the window model at a long context, beside slots for all tokens."""
    sys.stdout.write(f"\n{_WINDOW_MODEL}, {layers} layers, {context} tokens\n\n")
    show("layers hold", "MB", "T_v(1), ms", "tok/s", "T_v(4), ms", "prompt, tok/s")
    show(*["---"] * 6)
    model = build(_WINDOW_MODEL, layers)
    windows = windows_of(model)
    target = prepare(model, may_share_passes=False)
    ways: dict[str, Callable[[], SequenceState]] = {
        "the window's rows": target.states.make,
        "all rows": lambda: KVStore(windows, bucketed=target.bucketed),
    }

    def measure(make: Callable[[], SequenceState]) -> Iterator[str]:
        state = make()
        hold(state, layers, context)
        yield f"{state.nbytes / 1e6:.0f}"
        single = clock.median(lambda: run_round(model, state, 1, 1), rounds)
        yield f"{single:.2f}"
        yield f"{1e3 / single:.1f}"
        yield f"{clock.median(lambda: run_round(model, state, 4, 4), rounds):.2f}"
        chunk = clock.median(lambda: fill(model, state, state.length + _CHUNK), 1)
        yield f"{1e3 * _CHUNK / chunk:.0f}"

    for way, make in ways.items():
        show_as_measured(way, measure(make))


def parse() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description="What going back costs, by kind of state.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--tables", choices=("ways", "windows"), nargs="+")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=_SMALL)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--window-layers", type=int, default=26)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float)
    given = parser.parse_args()
    if given.minutes is None:
        given.minutes = math.inf if given.device == "cpu" else _GPU_MINUTES
    if given.tables is None:
        given.tables = ("ways",) if given.device == "cpu" else ("ways", "windows")
    return given


def main() -> None:
    """Print all tables."""
    given = parse()
    mx.set_default_device(mx.cpu if given.device == "cpu" else mx.gpu)
    clock = Clock(given.minutes)
    tables: list[tuple[str, Callable[[], None]]] = []
    if "ways" in given.tables:
        show("model and way", "chain", "ahead, ms", "T_v(1), ms", *(f"m = {m}" for m in _LENGTHS))
        show(*["---"] * (4 + len(_LENGTHS)))
        for name in given.models:
            run = partial(compare_ways, name, given.layers, given.rounds, clock)
            tables.append((name, run))
    if "windows" in given.tables:
        run = partial(compare_windows, given.window_layers, given.context, given.rounds, clock)
        tables.append(("windows", run))
    failed = []
    for index, (name, run) in enumerate(tables):
        clock.share(len(tables) - index)
        began = time.perf_counter()
        try:
            run()
        except OutOfTimeError:
            sys.stdout.write(f"\n{name}: out of time\n")
        # Whatever it is, the other models are still to be measured.
        except Exception:  # noqa: BLE001
            failed.append(name)
            traceback.print_exc()
        sys.stderr.write(f"{name}: {time.perf_counter() - began:.0f} s\n")
        mx.clear_cache()
    faulthandler.cancel_dump_traceback_later()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
