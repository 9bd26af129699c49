"""Flags that several commands share: for the stack, and for sampling."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import msgspec

from launch.settings.flags import Option, more_settings, read_more
from launch.settings.settings import BackendChoice, StackSettings, stack_settings
from launch.stack.run_dir import DEFAULT_NAME
from protocol.decoding.sampling_params import PRESETS
from protocol.errors import UsageError
from protocol.messages import Acceptance, Mode, Sampling
from protocol.settings import RANK_BACKENDS, LogLevel
from protocol.validation import describe

_DEFAULTS = StackSettings()
_MIB = 1024**2
_DEVICE = "Device of the {}: cpu, gpu or cuda:N. Left out: MLX's default."

WITHOUT_FLAG = (
    "allowed_hosts", "compute_units", "cpu_activations", "draft_timeout_s", "draft_weights",
    "hang_timeout_s", "idle_unload", "key", "kv_bytes", "max_body_bytes", "max_deaths",
    "max_prompt_bytes", "max_prompt_tokens", "max_stop_bytes", "max_stop_strings",
    "max_waiting", "memory_bytes", "metal_kernels", "parse_special", "prefill",
    "prompt_cache_bytes", "prompt_memory_bytes", "prompt_timeout_s", "rank_port", "rank_python",
    "rank_timeout_s", "rate_limit", "restart_window_s", "restarts", "start_timeout_s", "strict",
    "verify_timeout_s",
)  # fmt: skip
"""Rarely needed settings of a stack: in `ssd.toml`, in the environment, or by `--set`."""

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=msgspec.Struct)


def settings_of(*, more: Sequence[str] = (), **flags: Any) -> StackSettings:
    """Return the effective settings; None is an omitted flag.

    `more` holds the values of `--set`.
    """
    explicit = {key: value for key, value in flags.items() if value is not None}
    return stack_settings({**read_more(more, WITHOUT_FLAG), **explicit})


def options_of(kind: type[msgspec.Struct]) -> Callable[..., Callable[[F], F]]:
    """Return a factory of options whose names and defaults are those of a settings type."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}

    def option(flag: str, help_text: str, values: Any = None) -> Callable[[F], F]:
        name = flag.removeprefix("--").replace("-", "_")
        default = defaults[name]
        values = values or type(default)
        return click.option(
            flag, name, type=values, default=default, show_default=True, help=help_text
        )

    return option


def settings_from_flags(values: dict[str, Any], kind: type[S], more: Sequence[str] = ()) -> S:
    """Return the settings of a process, `more` of them by `--set`; raise UsageError if invalid."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        name, space, rest = describe(error).partition(" ")
        flag = f"--set {name}" if name in more else f"--{name.replace('_', '-')}"
        raise UsageError(f"{flag}{space}{rest}") from error


def _group(name: str, *options: tuple[tuple[str, ...], dict[str, Any]]) -> Callable[[F], F]:
    """Combine these options, which `--help` lists under `name`."""

    def decorate(function: F) -> F:
        for flags, attributes in reversed(options):
            function = click.option(*flags, cls=Option, group=name, **attributes)(function)
        return function

    return decorate


def _flag(*flags: str, **attributes: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return flags, attributes


def _setting(
    flag: str, help_text: str, values: Any = None, **attributes: Any
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Define a setting of a stack: the help shows its default, which the settings supply."""
    name = flag.split("/", maxsplit=1)[0].removeprefix("--").replace("-", "_")
    shown = _format_default(getattr(_DEFAULTS, name))
    return (flag,), {"help": help_text + shown, "type": values, "default": None, **attributes}


def _format_default(value: object) -> str:
    match value:
        case "" | False:
            return ""
        case True:
            return "  [default: on]"
        case int() if value >= _MIB and value % _MIB == 0:
            return f"  [default: {value}, {value // _MIB} MiB]"
    return f"  [default: {value}]"


def stack_options() -> Callable[[F], F]:
    """Add the options of a stack."""
    more = more_settings(WITHOUT_FLAG, "Processes")
    return _all_of(_model_options(), _process_options(), more, _rank_options())


def _all_of(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def _model_options() -> Callable[[F], F]:
    return _group(
        "Models",
        _setting("--model", "Target model: folder or hub name. Left out: the default pair's."),
        _setting("--adapter-path", "LoRA adapter for the target: a folder of mlx-lm's training.",
                 metavar="FOLDER"),
        _setting("--draft-model", "Draft model: folder or hub name."),
        _setting("--draft-backend", "What drafts; auto: a model where there is one, else ngram. "
                 "none, ngram: no drafter; prompts are looked up.",
                 click.Choice(get_args(BackendChoice))),
        _setting("--draft-command", "Program that drafts, on its stdin and stdout."),
        _setting("--draft-lines", "The draft command speaks the line protocol.", is_flag=True),
        _setting("--draft-server", "Draft server on another machine.", metavar="tcp://HOST:PORT"),
        _setting("--draft-server-key", "The server's public key, or its name in `ssd keys`.",
                 metavar="KEY"),
    )  # fmt: skip


def conversation_options(*, max_tokens: int) -> Callable[[F], F]:
    """Add the options of `ssd generate` and `ssd chat`; `max_tokens` is the default."""
    return _all_of(_group(
        "Prompt",
        _flag("--system-prompt", default="", help="System prompt."),
        _flag("-m", "--max-tokens", type=click.IntRange(min=0), default=max_tokens,
              show_default=True, help="Longest answer in tokens; 0: no limit but the context."),
    ), _group(
        "Answer",
        _flag("--show-draft", is_flag=True, help="Colour tokens by where they came from."),
        _flag("--name", default=DEFAULT_NAME, show_default=True,
              help="Attach to this stack if it is running."),
        _flag("-v", "--verbose", is_flag=True, help="Show processes as they start."),
    ), _group(
        "Speculation",
        _flag("--mode", type=click.Choice(get_args(Mode)), default="ssd", show_default=True,
              help="ar: plain decoding; sd: draft, then verify; ssd: both at once."),
        _flag("--num-draft-tokens", type=click.IntRange(0, 64), default=0, show_default=True,
              help="Draft tokens per round; 0 leaves it to the planner."),
    ))  # fmt: skip


def _rank_options() -> Callable[[F], F]:
    return _group(
        "Ranks",
        _setting("--target-ranks", "Spread the target over processes of this machine.",
                 click.IntRange(min=1)),
        _setting("--hosts", "Spread it over machines: a hosts file of mlx.launch.",
                 metavar="FILE"),
        _setting("--backend", "How ranks exchange arrays (not what drafts). Left out: nccl on "
                 "CUDA, else ring.", click.Choice(RANK_BACKENDS)),
        _setting("--split", "Pipeline the layers: how many per rank; auto: by memory and speed.",
                 metavar="N,N,...|auto"),
    )  # fmt: skip


def _process_options() -> Callable[[F], F]:
    count, positive = click.IntRange(min=0), click.IntRange(min=1)
    return _group(
        "Processes",
        _setting("--target-device", _DEVICE.format("target"), metavar="DEVICE"),
        _setting("--draft-device", _DEVICE.format("drafter"), metavar="DEVICE"),
        _setting("--decode-concurrency", "Requests decoded at once; others are queued.", positive),
        _setting("--prefill-step-size", "Most prompt tokens per prefill chunk; on CUDA four times "
                 "as many while nothing else waits.", positive),
        _setting("--prompt-cache-size", "Finished sequences kept as prefix cache.", count),
        _setting("--prompt-cache-file", "Keep the target's prefix cache here over restarts.",
                 metavar="FILE"),
        _setting("--log-level", "Log level of all processes (see `ssd logs`).",
                 click.Choice(get_args(LogLevel))),
    )  # fmt: skip


def http_options() -> Callable[[F], F]:
    """Add the options of the gateway."""
    return _group(
        "HTTP",
        _setting("--host", "Address to listen on."),
        _setting("--port", "0 takes a free one.", click.IntRange(0, 65535)),
        _setting("--api-key", "Key that clients must send. Other users can see arguments: "
                 "prefer SSD_API_KEY."),
        _setting("--allowed-origins", "Web pages that may use it from a browser, "
                 "separated by commas; * is all."),
        _setting("--preset", "Sampling of requests that do not set it.", click.Choice(PRESETS)),
    )  # fmt: skip


def several_models_options() -> Callable[[F], F]:
    """Add the options for several models."""
    return _group(
        "Several models",
        _setting("--models", "Several models, loaded on demand: a TOML file with a table for each, "
                 "or a folder of model folders.", metavar="PATH"),
    )  # fmt: skip


def sampling_options(*, measures: bool = False) -> Callable[[F], F]:
    """Add the sampling options; `take_sampling_choice` reads them.

    Args:
        measures: ignore the model's recommendation.
    """
    d = Sampling()
    recommends = "greedy" if measures else "as the model's generation_config.json says, else greedy"

    def default(value: float) -> str:
        return f"  [default: {value:g}]" if measures else "  [default: the preset's]"

    share = click.FloatRange(0, 1)
    return _all_of(_group(
        "Sampling",
        _flag("--temp", "--temperature", type=click.FloatRange(0, 100),
              help="0 is greedy." + default(d.temperature)),
        _flag("--top-p", type=share, help="Only the most likely tokens that together have this "
              "probability." + default(d.top_p)),
        _flag("--top-k", type=click.IntRange(min=0),
              help="Only this many most likely tokens; 0: all." + default(d.top_k)),
        _flag("--min-p", type=share, help="Only tokens at least this likely relative to the most "
              "likely one." + default(d.min_p)),
        _flag("--preset", type=click.Choice(PRESETS), default="default", show_default=True,
              help=f"A starting point; the flags above override it. default: {recommends}."),
        _flag("--seed", type=click.IntRange(-1, 2**63 - 1),
              help="Same seed, same answer; -1 draws one.  [default: drawn, and reported]"),
        _flag("--repetition-penalty", type=click.FloatRange(0, 10),
              help="Penalise tokens of prompt and answer; 1 and 0 are off.  [default: 1]"),
        _flag("--presence-penalty", type=click.FloatRange(-2, 2),
              help="Penalise tokens of the answer once; 0 is off.  [default: 0]"),
        _flag("--frequency-penalty", type=click.FloatRange(-2, 2),
              help="Penalise tokens of the answer per occurrence; 0 is off.  [default: 0]"),
        _flag("--json-schema", type=click.Path(path_type=Path), metavar="FILE",
              help="The answer is JSON that follows the schema in this file."),
    ), _speculation_options())  # fmt: skip


def _speculation_options() -> Callable[[F], F]:
    d = Sampling()
    return _group(
        "Speculation",
        _flag("--acceptance", type=click.Choice(get_args(Acceptance)),
              default=d.acceptance, show_default=True,
              help="coupled: the tokens of plain decoding; rejection: their distribution."),
        _flag("--saguaro-c", type=click.FloatRange(0, 1), metavar="C",
              default=d.saguaro, show_default=True,
              help="Rejection: the draft's weight for tokens prepared for; 1 is off."),
    )  # fmt: skip
