"""`ssd bench`: what the modes gain here, side by side."""

import contextlib
from pathlib import Path
from typing import Any

import click
import msgspec

from launch import bench, show
from launch.models import pair_of
from launch.options import sampling_options, settings_of, stack_options, take_sampling
from launch.session import private_stack
from launch.yardstick import Yardstick
from orchestrator.tokenizer import TargetTokenizer
from protocol.client import Client
from protocol.errors import UsageError


@click.command("bench")
@stack_options()
@sampling_options()
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSONL file: id, prompt, category; our own ten if left out.",
)
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Use so many, evenly.")
@click.option("-m", "--max-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--modes", default=",".join(bench.MODES), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all runs.")
def command(**options: Any) -> None:  # fmt: skip
    """Measure modes side by side, interleaved, and check that none changes a token."""
    modes = tuple(options.pop("modes").split(","))
    if unknown := set(modes) - set(bench.MODES):
        raise UsageError(f"unknown mode {sorted(unknown)[0]!r}; known: {', '.join(bench.MODES)}")
    sampling = take_sampling(options)
    if sampling.temperature and set(modes) & set(bench.REFERENCE_MODES):
        modes = tuple(mode for mode in modes if mode in bench.OUR_MODES)
        show.human().print("mlx-lm draws other random numbers: left out above temperature 0")
    prompts = bench.chosen_prompts(options.pop("prompts"), options.pop("limit"))
    max_tokens, json_file = options.pop("max_tokens"), options.pop("json_file")
    settings = settings_of(**options)
    pair = pair_of(settings)
    with (
        private_stack(settings, show.nothing) as supervisor,
        contextlib.closing(Client(supervisor.run_dir.clients_address)) as client,
        Yardstick(pair, settings.target_device, settings.emulate_target_cost) as yardstick,
    ):
        tokenizer = TargetTokenizer(Path(pair.model))
        runs = bench.Bench(client, yardstick, tokenizer, modes, sampling, max_tokens)
        with show.human().status("measuring") as status:
            runs.run(prompts, status.update)
    show.plain().print(bench.table(runs))
    show.plain().print(bench.phases(runs))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.encode(runs.runs))
    runs.check()
    show.plain().print(runs.verdict())
