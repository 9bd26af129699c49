"""`ssd`: the command line."""

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, get_args

import click
import msgspec

from launch import bench, distill, generate, show
from launch.config import StackSettings, stack_settings
from launch.control import ask_supervisor
from launch.models import add_default, pair_of
from launch.options import sampling_options, stack_options, take_sampling
from launch.rundir import DEFAULT_NAME, RunDir
from launch.session import private_stack, session
from launch.supervisor import Supervisor
from launch.yardstick import Yardstick
from orchestrator.client import Client
from orchestrator.tokenizer import TargetTokenizer
from protocol.errors import RuntimeFailure, SsdError, UsageError
from protocol.messages import FanOutPolicy, Generate, ProcessStatus, SwapDrafter
from protocol.settings import BACKENDS

_INTERRUPTED = 130


def _flags(**values: Any) -> StackSettings:
    return stack_settings({key: value for key, value in values.items() if value is not None})


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-ssd")
def cli() -> None:
    """Lossless, faster local LLM decoding: speculative speculative decoding."""


@cli.command("launch")
@stack_options()
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
def launch_command(name: str, **stack: Any) -> None:
    """Start a stack and keep it running until Ctrl-C."""
    settings = _flags(**stack)
    supervisor = Supervisor(settings, pair_of(settings), RunDir(name), show.process_line)
    supervisor.start()
    try:
        show.human().print("ready; Ctrl-C stops everything")
        supervisor.wait()
    finally:
        supervisor.stop()
        show.human().print("stopped")


@cli.command("generate")
@click.argument("text", required=False)
@stack_options()
@sampling_options()
@click.option("-p", "--prompt", help="The prompt; - reads standard input.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSONL file: id, prompt.")
@click.option("--system-prompt", default="", help="Put before the prompt.")
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--mode", type=click.Choice(["ar", "sd", "ssd"]), default="ssd", show_default=True)
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(0, 64),
    default=0,
    help="Draft tokens per round; 0 leaves it to the orchestrator.",
)
@click.option(
    "--fan-out",
    type=click.IntRange(0, 256),
    default=0,
    help="Branches prepared per round; 0 leaves it to the orchestrator.",
)
@click.option("--name", default=DEFAULT_NAME, help="Attach to this stack if it is running.")
@click.option(
    "--fan-out-policy",
    type=click.Choice(get_args(FanOutPolicy)),
    default="online",
    show_default=True,
    help="Share branches out by what was learned, by Theorem 12, or evenly.",
)
@click.option("--explain", is_flag=True, help="Say what was chosen and why.")
@click.option("--stats", is_flag=True, help="Print statistics after each answer.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per prompt.")
@click.option("--show-draft", is_flag=True, help="Colour tokens by where they came from.")
@click.option("-v", "--verbose", is_flag=True, help="Show the processes as they start.")
def generate_command(**options: Any) -> None:  # fmt: skip
    """Answer a prompt: on the running stack, or on a private one."""
    prompts = _prompts(options.pop("text"), options.pop("prompt"), options.pop("prompts"))
    report = show.process_line if options.pop("verbose") else _silent
    name = options.pop("name")
    answer_options = _answer_options(options)
    settings = _flags(**options)
    with session(settings, name, report) as client:
        generate.answer_all(client, prompts, answer_options)


def _prompts(text: str | None, prompt: str | None, file: Path | None) -> list[generate.Prompt]:
    given = [source for source in (text, prompt, file) if source is not None]
    if len(given) != 1:
        raise UsageError("give exactly one of a prompt, --prompt and --prompts")
    if file is not None:
        return generate.read_prompts(file)
    return [generate.Prompt(generate.read_prompt(str(given[0])))]


def _answer_options(options: dict[str, Any]) -> generate.Options:
    """Take the options of the answer out of `options`; what is left configures the stack."""
    sampling = take_sampling(options)
    template = Generate(
        request=0,
        sampling=sampling,
        max_tokens=options.pop("max_tokens"),
        stop=list(options.pop("stop")),
        mode=options.pop("mode"),
        lookahead=options.pop("num_draft_tokens"),
        fan_out=options.pop("fan_out"),
        fan_out_policy=options.pop("fan_out_policy"),
    )
    return generate.Options(
        template=template,
        system_prompt=options.pop("system_prompt"),
        as_json=options.pop("as_json"),
        statistics=options.pop("stats"),
        show_draft=options.pop("show_draft"),
        explain=options.pop("explain"),
    )


@cli.command("swap-drafter")
@click.option("--backend", type=click.Choice(BACKENDS), required=True)
@click.option("--draft-model", default="", help="Model folder or hub name, for mlx.")
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
def swap_command(backend: str, draft_model: str, name: str) -> None:
    """Exchange the drafter of a running stack; requests go on."""
    timeout_s = stack_settings({}).start_timeout_s
    ask_supervisor(name, SwapDrafter(backend=backend, model=draft_model), timeout_s)
    show.human().print(f"the stack {name!r} now drafts with {backend}")


@cli.command("bench")
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
def bench_command(**options: Any) -> None:  # fmt: skip
    """Measure modes side by side, interleaved, and check that none changes a token."""
    modes = tuple(options.pop("modes").split(","))
    if unknown := set(modes) - set(bench.MODES):
        raise UsageError(f"unknown mode {sorted(unknown)[0]!r}; known: {', '.join(bench.MODES)}")
    sampling = take_sampling(options)
    if sampling.temperature and set(modes) & set(bench.REFERENCE_MODES):
        modes = tuple(mode for mode in modes if mode in bench.OUR_MODES)
        show.human().print("mlx-lm draws other random numbers: left out above temperature 0")
    prompts = bench.read_prompts(options.pop("prompts"), options.pop("limit"))
    max_tokens, json_file = options.pop("max_tokens"), options.pop("json_file")
    settings = _flags(**options)
    pair = pair_of(settings)
    with (
        private_stack(settings, _silent) as supervisor,
        contextlib.closing(Client(supervisor.run_dir.clients_address)) as client,
        Yardstick(pair) as yardstick,
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


cli.add_command(distill.command)


@cli.group("models")
def models_group() -> None:
    """Models on this machine."""


@models_group.command("add")
@click.argument("pair", type=click.Choice(["default"]))
def models_add(pair: str) -> None:
    """Set up a pair of models; `default` is SmolLM2-135M-Instruct and its drafter."""
    del pair
    add_default(show.human().print)


def _silent(status: ProcessStatus) -> None:
    """Say nothing about the processes of a private stack."""
    del status


def _check_shadowing() -> None:
    """Our import names are generic; another package of such a name must not hide ours."""
    home = Path(__file__).resolve().parent.parent
    for room in ("protocol", "services", "orchestrator"):
        found = importlib.util.find_spec(room)
        origin = Path(found.origin).resolve() if found and found.origin else None
        if origin is None or origin.parent.parent != home:
            raise RuntimeFailure(
                f"the package {room!r} is imported from {origin}, not from {home}; "
                "install mlx-ssd into an environment of its own"
            )


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP stop us as Ctrl-C does: through the finally clauses."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    yield


def main() -> None:
    """Entry point: runs a command and turns errors into a sentence and an exit code."""
    try:
        _check_shadowing()
        with _signals_as_interrupts():
            cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(_INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SsdError as error:
        show.human().print(f"error: {error}", markup=False)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
