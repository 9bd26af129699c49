"""One benchmark, from its settings to its result."""

import contextlib
import datetime
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from launch.bench import machine
from launch.bench.bandwidth import read_weight_bytes
from launch.bench.memory import MemoryWatch
from launch.bench.profile import profile, sample
from launch.bench.profile_models import open_profilers
from launch.bench.result import BenchFile, Config, Hardware, Overlap, Profile, WeightReading
from launch.bench.runs import Bench, Progress
from launch.bench.summary import categories, summary
from launch.bench.variant import Variant
from launch.doctor import ask_hardware
from launch.models.pair import Pair
from launch.prompts import Prompt
from launch.settings.settings import StackSettings
from launch.stack.prepared import await_prepared
from launch.stack.session import private_stack
from launch.terminal import console
from launch.workers.reference import ReferenceWorker
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.client.client import Client
from protocol.messages import ChatMessage, Finished, Generate, Sampling, Statistics
from protocol.version import VERSION

_FIRST = "Say hello."


@dataclass(frozen=True)
class BenchConfig:
    """Settings of a benchmark."""

    settings: StackSettings
    pair: Pair
    variants: tuple[Variant, ...]
    samplings: tuple[Sampling, ...]
    prompts: list[Prompt]
    source: str
    """Source of the prompts."""
    max_tokens: int
    repeats: int
    profile: bool
    overlap: bool
    runs: bool = True


class Measured(NamedTuple):
    """Measurements besides the runs."""

    cold: dict[str, float]
    profile: Profile | None
    overlap: Overlap | None
    reading: WeightReading | None


def measure(config: BenchConfig, progress: Callable[[int], Progress]) -> BenchFile:
    """Run the benchmark; `progress` takes the number of steps and returns a callback for each.

    Raises:
        SsdError: a process failed. Whether the runs were lossless is in the result.
    """
    tokenizer = TargetTokenizer(Path(config.pair.model))
    text = tokenizer.encode([ChatMessage("user", config.prompts[0].prompt)])
    survey = ask_hardware() if config.runs else None
    verify_ms, draft_ms, overlap = _measure_alone(config, text, progress(2))
    began = time.monotonic()
    with _open_stack(config.settings) as client, _open_drafter_stacks(config) as others:
        cold = {"ready_s": time.monotonic() - began}
        cold["first_token_s"] = _warm_up(client).ttft_ms / 1e3
        for stack_client in (client, *others.values()):
            await_prepared(stack_client)
        cold["prepared_s"] = time.monotonic() - began
        status = client.status()
        profiled = None
        if config.profile:
            step = progress(40)
            step("a few answers")
            profiled = profile(verify_ms, draft_ms, sample(client, config.prompts), step)
        bench = _runs(config, {"": client, **others}, tokenizer, progress)
        hardware = machine.hardware({s.role: s.compute_unit for s in status.services})
        reading = None
        if survey is not None and survey.read_bytes_s:
            reported = next((s.weight_bytes for s in status.services if s.weight_bytes), 0)
            weight_bytes = reported or read_weight_bytes(config.pair.model, survey.device)
            reading = WeightReading(weight_bytes=weight_bytes, read_bytes_s=survey.read_bytes_s)
        measured = Measured(cold, profiled, overlap, reading)
        return _result(bench, _config(config), hardware, measured)


def _measure_alone(
    config: BenchConfig, text: list[int], progress: Progress
) -> tuple[dict[str, float], dict[str, float], Overlap | None]:
    """Measure T_v, T_d and the overlap before a stack runs that would disturb them."""
    if not (config.profile or config.overlap):
        return {}, {}, None
    with open_profilers(config.settings, config.pair, text) as both:
        verify_ms, draft_ms = {}, {}
        if config.profile:
            progress("target and drafter, each alone")
            verify_ms, draft_ms = both.verify_ms(), both.draft_ms()
        overlap = None
        if config.overlap:
            progress("target and drafter, in turn and together")
            overlap = both.overlap()
        return verify_ms, draft_ms, overlap


def _warm_up(client: Client) -> Statistics:
    """Return the statistics of a stack's first answer."""
    messages = [ChatMessage("user", _FIRST)]
    request = Generate(request=client.number(), messages=messages, max_tokens=2, mode="ar")
    return next(m.statistics for m in client.generate(request) if isinstance(m, Finished))


@contextlib.contextmanager
def _open_stack(settings: StackSettings) -> Iterator[Client]:
    with (
        private_stack(settings, console.report_trouble) as supervisor,
        contextlib.closing(Client(supervisor.run_dir.clients_address)) as client,
    ):
        yield client


@contextlib.contextmanager
def _open_drafter_stacks(config: BenchConfig) -> Iterator[dict[str, Client]]:
    """Start and warm up a stack for each drafter that a mode names."""
    names = dict.fromkeys(variant.drafter for variant in config.variants if variant.drafter)
    with contextlib.ExitStack() as opened:
        clients: dict[str, Client] = {}
        for name in names if config.runs else ():
            settings = msgspec.structs.replace(config.settings, draft_model=name)
            clients[name] = opened.enter_context(_open_stack(settings))
            _warm_up(clients[name])
        yield clients


def _pids(clients: dict[str, Client]) -> dict[str, int]:
    """Return the processes of all stacks; those of another drafter's stack carry its name."""
    pids: dict[str, int] = {}
    for drafter, client in clients.items():
        status = client.status()
        of_stack = {"orchestrator": status.pid} | {s.role: s.pid for s in status.services}
        pids |= {f"{role} {drafter}".strip(): pid for role, pid in of_stack.items()}
    return pids


def _runs(
    config: BenchConfig,
    clients: dict[str, Client],
    tokenizer: TargetTokenizer,
    progress: Callable[[int], Progress],
) -> Bench:
    settings = config.settings
    with (
        ReferenceWorker(config.pair, settings.target_device) as reference,
        MemoryWatch({**_pids(clients), "mlx-lm": reference.pid}) as memory,
    ):
        bench = Bench(
            clients=clients,
            reference=reference,
            tokenizer=tokenizer,
            memory=memory,
            variants=config.variants,
            samplings=config.samplings,
            max_tokens=config.max_tokens,
            repeats=config.repeats,
        )
        if config.runs:
            reference.await_loaded()
            bench.run(config.prompts, progress(bench.steps(config.prompts)))
        return bench


def _result(bench: Bench, config: Config, hardware: Hardware, measured: Measured) -> BenchFile:
    return BenchFile(
        tool_version=VERSION,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hardware=hardware,
        config=config,
        cold_start=measured.cold,
        runs=bench.runs,
        summary=summary(bench.runs),
        categories=categories(bench.runs),
        profile=measured.profile,
        overlap=measured.overlap,
        reading=measured.reading,
        checks=bench.checks(),
    )


def _config(config: BenchConfig) -> Config:
    return Config(
        model=config.pair.model,
        draft_model=config.pair.draft_model,
        draft_backend=config.pair.backend,
        mode=list(config.variants),
        sampling=list(config.samplings),
        max_tokens=config.max_tokens,
        repeats=config.repeats,
        prompts=config.source,
        versions=machine.versions(),
        command=shlex.join(["ssd", *sys.argv[1:]]),
    )
