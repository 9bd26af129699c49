"""`ssd load`: throughput with concurrent requests."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from launch.bench import load
from launch.bench.http_load import Server
from launch.models.pair import pair_of
from launch.prompts import chosen_prompts
from launch.settings.flags import Command
from launch.settings.options import sampling_options, settings_of, stack_options
from launch.settings.sampling import take_sampling
from launch.stack.prepared import await_prepared
from launch.stack.session import private_stack
from launch.terminal import console
from launch.workers.reference import ReferenceWorker
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.client.client import Client
from protocol.errors import UsageError
from protocol.messages import ChatMessage, Generate, Sampling

_Ask = Callable[..., load.Load]
_MODES = ("ar", "sd", "ssd", load.MLX_LM)
_HTTP_MODES = ("ar", "server")
_WITH_URL = frozenset(
    {"url", "model", "api_key", "prompts", "requests", "max_tokens", "streams", "modes",
     "json_file"}
)  # fmt: skip
_START_S = 60.0
"""Longest wait for the server to start."""


@click.command("load", cls=Command)
@stack_options()
@sampling_options(measures=True)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSONL file: id, prompt; else eleven built-in ones.",
)
@click.option("--requests", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("-m", "--max-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option(
    "--streams", default="1,2,4,8", show_default=True, help="Numbers of requests in flight."
)
@click.option("--modes", help="ar,sd,ssd,mlx-lm; with --url: server,ar.  [default: ar,ssd,mlx-lm]")
@click.option("--url", help="Send the requests to this OpenAI-compatible server.")
@click.option("--api-key", default="", envvar="SSD_API_KEY", help="With --url: its API key.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write all answers as JSON."
)
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Measure throughput with several requests in flight.

    With --url they go to a running server over HTTP, for its model --model: mode `server`
    lets it decode as it likes, `ar` asks an ssd server for plain decoding. Start it without a
    prefix cache (--prompt-cache-size 0), since each prompt is sent once per row of the table.
    """
    streams = _numbers(options.pop("streams"))
    url, mode_names = options.pop("url"), str(options.pop("modes") or "").split(",")
    possible = _HTTP_MODES if url else _MODES
    usual: list[str] = ["server"] if url else ["ar", "ssd", load.MLX_LM]
    modes: list[str] = mode_names if any(mode_names) else usual
    if unknown := set(modes) - set(possible):
        raise UsageError(f"unknown mode {min(unknown)!r}; known: {', '.join(possible)}")
    api_key = options.pop("api_key")
    texts = [p.prompt for p in chosen_prompts(options.pop("prompts"), 0)]
    count, max_tokens = options.pop("requests"), options.pop("max_tokens")
    texts = [texts[number % len(texts)] for number in range(count)]
    json_file = options.pop("json_file")
    if url:
        _refuse_others(context)
        server = Server(url, options["model"] or "", api_key)
        server.await_ready(_START_S, console.stderr().print)
        loads = _of_server(server, texts, max_tokens, modes, streams)
    else:
        loads = _of_stack(options, texts, max_tokens, modes, streams)
    console.stdout().print(load.table(loads))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.encode(loads))


def _refuse_others(context: click.Context) -> None:
    """Reject flags for the stack and for sampling, which the server determines."""
    for name in context.params.keys() - _WITH_URL:
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --url; leave it out")


def _of_server(
    server: Server, texts: list[str], max_tokens: int, modes: list[str], streams: list[int]
) -> list[load.Load]:
    server.load(modes[0], texts[:1], 16, 1)  # warm-up
    loads = [server.load(mode, texts, max_tokens, number) for mode in modes for number in streams]
    if count := len(server.resets):
        console.stderr().print(f"the server reset {count} connections, which were made again")
    return loads


def _of_stack(
    options: dict[str, Any], texts: list[str], max_tokens: int, modes: list[str],
    streams: list[int],
) -> list[load.Load]:  # fmt: skip
    sampling = take_sampling(options)
    if options["prompt_cache_size"] is None:
        options["prompt_cache_size"] = 0  # every prompt is repeated for each row of the table
    if options["decode_concurrency"] is None:
        options["decode_concurrency"] = max(streams)
    settings = settings_of(**options)
    tokenizer = TargetTokenizer(Path(pair_of(settings).model))
    prompts = [tokenizer.encode([ChatMessage("user", text)]) for text in texts]
    own_modes = [mode for mode in modes if mode != load.MLX_LM]
    compares_mlx_lm = load.MLX_LM in modes and not sampling.temperature
    with contextlib.ExitStack() as opened:
        ask: dict[str, _Ask] = {}
        if own_modes:
            supervisor = opened.enter_context(private_stack(settings, console.report_trouble))
            address = supervisor.run_dir.clients_address
            load.load_stack(address, _requests(prompts[:1], "ssd", sampling, 16), 1)  # warm-up
            with contextlib.closing(Client(address)) as client:
                await_prepared(client)
            for mode in own_modes:
                requests = _requests(prompts, mode, sampling, max_tokens)
                ask[mode] = partial(load.load_stack, address, requests)
        if compares_mlx_lm:
            worker = ReferenceWorker(pair_of(settings), settings.target_device)
            reference = opened.enter_context(worker)
            stop_ids = list(tokenizer.stop_ids)
            load.load_mlx_lm(reference, prompts[:1], 1, 4, stop_ids)
            ask[load.MLX_LM] = partial(
                load.load_mlx_lm, reference, prompts, max_tokens=max_tokens, stop_ids=stop_ids
            )
        # Interleaved, so that a slow phase of the machine affects all of them.
        results = [(mode, ask[mode](streams=number)) for number in streams for mode in ask]
    return [result for mode in ask for name, result in results if name == mode]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--streams {text!r} is not a list of numbers such as 1,2,4,8") from error
    if min(numbers) < 1:
        raise UsageError("--streams: at least one request must be in flight")
    return numbers


def _requests(
    prompts: list[list[int]], mode: str, sampling: Sampling, max_tokens: int
) -> list[Generate]:
    template = msgspec.convert(
        {"request": 0, "mode": mode, "max_tokens": max_tokens}, Generate, strict=False
    )
    return [
        msgspec.structs.replace(template, tokens=prompt, sampling=sampling) for prompt in prompts
    ]
