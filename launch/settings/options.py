"""Flags that several verbs share: what a stack is made of, and how tokens are drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import msgspec

from launch.settings.settings import StackSettings, stack_settings
from launch.terminal.generate import new_seed
from protocol.decoding.grammar import check_grammar, json_grammar
from protocol.decoding.sampling_params import PRESETS, check_sampling, get_preset
from protocol.errors import UsageError
from protocol.messages import Acceptance, LogitsOptions, Sampling
from protocol.settings import BACKENDS, COMPUTE_UNITS, PREFILLS, LogLevel

_DEVICE = "Where the {} computes: cpu, gpu, or cuda:N. MLX's default device if left out."
_EMULATE = (
    "For measurements: add layers to the target that cost what a target of this size "
    "costs (4x, 8B, 16GB) and change no token."
)

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=msgspec.Struct)


def _apply(decorators: list[Callable[[F], F]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def settings_of(**flags: Any) -> StackSettings:
    """The settings in force, given these flags; None is a flag that was not given."""
    return stack_settings({key: value for key, value in flags.items() if value is not None})


def options_of(kind: type[msgspec.Struct]) -> Callable[..., Callable[[F], F]]:
    """Makes options whose names and defaults are those of a settings type."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}

    def option(flag: str, help_text: str, values: Any = None) -> Callable[[F], F]:
        name = flag.removeprefix("--").replace("-", "_")
        default = defaults[name]
        values = values or type(default)
        return click.option(
            flag, name, type=values, default=default, show_default=True, help=help_text
        )

    return option


def settings_from_flags(values: dict[str, Any], kind: type[S]) -> S:
    """Settings of a process; raises UsageError naming the flag that is wrong."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UsageError(str(error).replace("$.", "--").replace("_", "-")) from error


def stack_options() -> Callable[[F], F]:
    """What the stack is made of."""
    return _apply(
        [
            click.option("--model", help="Target: model folder or hub name."),
            click.option("--draft-model", help="Drafter: model folder or hub name."),
            click.option("--draft-backend", type=click.Choice(["auto", *BACKENDS])),
            click.option("--compute-units", type=click.Choice(COMPUTE_UNITS),
                         help="Where a converted model runs; reference: slow, on any machine."),
            click.option("--draft-command", help="Drafter: a program that speaks our protocol."),
            click.option("--draft-lines", is_flag=True, default=None,
                         help="The draft command speaks the line protocol."),
            click.option("--draft-server", metavar="ADDRESS",
                         help="Drafter: on another machine, tcp://HOST:PORT."),
            click.option("--draft-server-key", metavar="KEY",
                         help="Its public key, or the name under which you trust it."),
            click.option("--key", metavar="NAME", help="Which of your keys it is shown."),
            click.option("--prefill", type=click.Choice(PREFILLS),
                         help="Prompts through the target's CoreML form: where faster, or always."),
            click.option("--log-level", type=click.Choice(get_args(LogLevel)),
                         help="Of all processes; see `ssd logs`."),
            click.option("--prefill-step-size", type=click.IntRange(min=1)),
            click.option("--memory/--no-memory", default=None,
                         help="Begin with what the planner learned in earlier runs, or anew."),
            click.option("--decode-concurrency", type=click.IntRange(min=1),
                         help="Requests decoded at the same time; others wait in line."),
            click.option("--max-waiting", type=click.IntRange(min=0),
                         help="Requests in line before more are refused; 0: any number."),
            click.option("--prompt-cache-size", type=click.IntRange(min=0),
                         help="Finished requests whose KV is kept for the next turn."),
            click.option("--prompt-cache-bytes", type=click.IntRange(min=0),
                         help="Most memory for them, per model."),
            click.option("--prompt-cache-file", metavar="FILE",
                         help="Save the target's at the end, and begin with them next time."),
            click.option("--kv-bytes", type=click.IntRange(min=0),
                         help="Most memory for the KV of open requests; 0: half of what is free."),
            click.option("--target-device", metavar="DEVICE", help=_DEVICE.format("target")),
            click.option("--draft-device", metavar="DEVICE", help=_DEVICE.format("drafter")),
            click.option("--emulate-target-cost", metavar="SIZE", help=_EMULATE),
        ]
    )  # fmt: skip


def http_options() -> Callable[[F], F]:
    """Where and for whom the gateway answers."""
    d = StackSettings()
    return _apply(
        [
            click.option("--host", help=f"Address to listen on.  [default: {d.host}]"),
            click.option("--port", type=click.IntRange(0, 65535),
                         help=f"0 takes a free one.  [default: {d.port}]"),
            click.option("--api-key", help="What clients must know. Others can read arguments: "
                         "better set SSD_API_KEY."),
            click.option("--allowed-origins", help="Web pages that may use it from a browser, "
                         "separated by commas; * is all."),
            click.option("--max-body-bytes", type=click.IntRange(min=1),
                         help=f"Largest request.  [default: {d.max_body_bytes}]"),
            click.option("--rate-limit", type=click.IntRange(min=0),
                         help="Requests a minute from one address; 0 is any number."),
            click.option("--max-prompt-tokens", type=click.IntRange(min=0),
                         help="Longest prompt; 0 is what the context holds."),
            click.option("--preset", type=click.Choice(PRESETS),
                         help="What requests get that do not say otherwise."),
        ]
    )  # fmt: skip


def sampling_options() -> Callable[[F], F]:
    """How tokens are drawn; `take_sampling` reads them."""
    d = Sampling()
    below, share = click.FloatRange(0, 1, max_open=True), click.FloatRange(0, 1, min_open=True)
    return _apply(
        [
            click.option("--temp", "--temperature", type=click.FloatRange(0, 100),
                         help=f"0 is greedy.  [default: {d.temperature:g}]"),
            click.option("--top-p", type=share),
            click.option("--top-k", type=click.IntRange(min=0)),
            click.option("--min-p", type=below),
            click.option("--preset", type=click.Choice(PRESETS), default="default",
                         show_default=True, help="A start; the flags above win."),
            click.option("--repetition-penalty", type=click.FloatRange(0, 10, min_open=True),
                         help="Against tokens of prompt and answer; above 1."),
            click.option("--presence-penalty", type=click.FloatRange(-2, 2),
                         help="Against tokens of the answer."),
            click.option("--frequency-penalty", type=click.FloatRange(-2, 2),
                         help="Against tokens of the answer, each time they occur."),
            click.option("--json-schema", type=click.Path(path_type=Path),
                         help="The answer will be JSON that follows the schema in this file."),
            click.option("--seed", type=click.IntRange(0, 2**63 - 1),
                         help="Same seed, same answer; drawn and reported if left out."),
            click.option("--acceptance", type=click.Choice(get_args(Acceptance)),
                         default=d.acceptance, show_default=True,
                         help="coupled: the tokens of plain decoding; rejection: their law."),
            click.option("--draft-temp", type=click.FloatRange(0, 100),
                         help="The drafter's own temperature; no answer's law depends on it."),
            click.option("--draft-top-p", type=share, help="The drafter's own top-p."),
            click.option("--saguaro-c", type=_Weight(), default=d.saguaro, show_default=True,
                         help="Rejection: the draft's weight for tokens prepared for; 1 is off, "
                              "auto tries a few and prefers the fastest."),
        ]
    )  # fmt: skip


class _Weight(click.FloatRange):
    """C of Saguaro sampling: a number from 0 to 1, or `auto`."""

    name = "C"

    def __init__(self) -> None:
        super().__init__(0, 1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, param, ctx)


def take_saguaro_choice(options: dict[str, Any]) -> bool:
    """Whether `--saguaro-c auto` was given; then a number takes its place in `options`."""
    chosen: bool = options["saguaro_c"] == "auto"
    if chosen:
        options["saguaro_c"] = Sampling().saguaro
    return chosen


def take_sampling(options: dict[str, Any]) -> Sampling:
    """Take the sampling options out of `options`; raises UsageError if they contradict."""
    seed = options.pop("seed")
    if options["saguaro_c"] == "auto":
        raise UsageError("--saguaro-c auto is for `generate`; give a number here")
    given = {
        "temperature": options.pop("temp"),
        "top_p": options.pop("top_p"),
        "top_k": options.pop("top_k"),
        "min_p": options.pop("min_p"),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    sampling = Sampling(
        **{**get_preset(options.pop("preset")), **chosen},
        seed=new_seed() if seed is None else seed,
        acceptance=options.pop("acceptance"),
        draft_temperature=options.pop("draft_temp"),
        draft_top_p=options.pop("draft_top_p"),
        saguaro=options.pop("saguaro_c"),
        logits_options=_take_shape(options),
    )
    check_sampling(sampling)
    return sampling


def _take_shape(options: dict[str, Any]) -> LogitsOptions | None:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = {name: options.pop(name) for name in names}
    schema: Path | None = options.pop("json_schema")
    asked = {name: value for name, value in penalties.items() if value is not None}
    if schema is not None:
        asked["grammar"] = json_grammar(_read_schema(schema))
        check_grammar(asked["grammar"])
    shape = LogitsOptions(**asked)
    return shape if shape != LogitsOptions() else None


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{str(path)!r} holds no JSON schema: {error}") from error
