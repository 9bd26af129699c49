"""Settings of a stack: flag > environment (`SSD_*`) > `ssd.toml` > default.

Unknown keys are errors everywhere. What a child process has a default for, has it from there.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from protocol.decoding.sampling_params import PresetName
from protocol.errors import UsageError
from protocol.gateway import GatewaySettings
from protocol.settings import (
    ComputeUnits,
    CpuActivations,
    Device,
    DraftWeights,
    LogLevel,
    MetalKernels,
    OrchestratorSettings,
    Prefill,
    VerifierSettings,
)
from protocol.validation import describe

BackendChoice = Literal["auto", "none", "mlx", "head", "coreml", "ngram", "stdio", "remote"]

CONFIG_FILE = "ssd.toml"
_PREFIX = "SSD_"
# Environment variables with our prefix that are not settings of a stack.
_OTHER_VARIABLES = frozenset({"SSD_RUN_DIR", "SSD_CACHE_DIR", "SSD_KEYS_DIR"})
_HUGE = 10**18
"""Of no setting anybody has so much; it still fits into what goes over the wire."""


def _default(kind: type[msgspec.Struct], name: str) -> Any:
    """The default that a child process has for a setting."""
    return next(field.default for field in msgspec.structs.fields(kind) if field.name == name)


class StackSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What runs: the pair, and how its processes behave."""

    model: str = ""
    """Target: a model folder or hub name; empty is the default pair's target."""
    adapter_path: str = ""
    """Folder of a LoRA adapter of mlx-lm for the target; empty: none."""
    draft_model: str = ""
    """Drafter: a model or a published head, as folder or hub name; empty is the default pair's, if
    the target is too."""
    draft_backend: BackendChoice = "auto"
    """`auto`: stdio with a draft command, remote with a draft server; with a draft model coreml
    (on macOS, if it is converted), head (a published head) or mlx; else ngram. `none`: ngram."""
    compute_units: ComputeUnits = "auto"
    """Where a converted model runs."""
    draft_weights: DraftWeights = "auto"
    """What an MLX drafter multiplies with: bytes on a CPU, bytes, or its weights as they are."""
    draft_command: str = ""
    """Backend stdio: the program that drafts, with its arguments, as in a shell."""
    draft_lines: bool = False
    """Backend stdio: the program speaks the line protocol."""
    draft_server: str = ""
    """Backend remote: where the draft server listens, tcp://HOST:PORT."""
    draft_server_key: str = ""
    """Backend remote: its public key, or the name under which it is trusted (`ssd keys`)."""
    key: str = "default"
    """Backend remote: which of our own keys we show it."""
    prefill_step_size: Annotated[int, msgspec.Meta(ge=1)] = _default(
        VerifierSettings, "prefill_step_size"
    )
    decode_concurrency: Annotated[int, msgspec.Meta(ge=1)] = _default(
        OrchestratorSettings, "concurrency"
    )
    """Requests decoded at the same time; others wait in line."""
    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = _default(OrchestratorSettings, "max_waiting")
    """Requests in line, beyond which more are refused; 0 means any number."""
    prompt_cache_size: Annotated[int, msgspec.Meta(ge=0)] = _default(
        VerifierSettings, "prompt_cache_size"
    )
    """Finished sequences whose KV each model keeps, for others with the same beginning."""
    prompt_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(
        VerifierSettings, "prompt_cache_bytes"
    )
    """Most memory that each model may use for them."""
    prompt_cache_file: str = ""
    """Where the target's are saved at the end and read at the start; empty: nowhere."""
    kv_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(VerifierSettings, "kv_bytes")
    """Most memory for the target's KV of open requests; 0 is half of what is free."""
    prefill: Prefill = "mlx"
    """Who computes prompts: the target itself, or its converted form where that is faster."""
    metal_kernels: MetalKernels = "auto"
    """Kernels for the few rows of a verification on Apple's GPUs: where they are faster, wherever
    they are right, or never."""
    cpu_activations: CpuActivations = "int8"
    """What a quantised target's weights are multiplied with on a CPU: activations rounded to eight
    bits, or floats, as mlx-lm does."""
    target_device: Device = ""
    draft_device: Device = ""
    target_ranks: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Processes on this machine that the target is spread over."""
    hosts: str = ""
    """Machines that it is spread over: a file in the format of `mlx.launch`."""
    backend: str = ""
    """How the ranks exchange arrays; empty: as the hosts file says, else nccl or ring."""
    split: str = ""
    """Pipelined: layers per rank, as in 20,12; auto: by memory and speed, measured on each."""
    rank_python: str = ""
    """The interpreter on the other machines; empty: the same path as here."""
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 32323
    """First port that the ranks use between machines; one more per rank."""
    rank_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Silence after which a rank is lost and the group is started again."""
    max_prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "max_prompt_tokens"
    )
    """Longest prompt that is taken; 0 means whatever the context holds."""
    max_prompt_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "max_prompt_bytes"
    )
    """The same in bytes of text, checked before it is tokenised; 0 is no limit."""
    prompt_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = _default(
        OrchestratorSettings, "prompt_timeout_s"
    )
    """Longest time that rendering and tokenising a prompt may take."""
    prompt_memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "prompt_memory_bytes"
    )
    """Memory that this may take (Linux); 0 is no limit."""
    parse_special: bool = _default(OrchestratorSettings, "parse_special")
    """Whether special tokens in the text of messages are read as such, so that whoever wrote a
    message can end a turn and begin another."""
    max_stop_strings: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "max_stop_strings"
    )
    max_stop_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "max_stop_bytes"
    )
    """Of one stop string; 0 is no limit, as above."""
    max_deaths: Annotated[int, msgspec.Meta(ge=1)] = _default(OrchestratorSettings, "max_deaths")
    """How often a process may die while it works on a request before that request is ended."""
    http: bool = False
    """Whether a gateway answers HTTP."""
    host: str = "127.0.0.1"
    """Where; an address that others can reach needs a key."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    """0 takes a free one."""
    api_key: str = ""
    """What HTTP clients must know; empty lets everybody in who can reach the address."""
    allowed_hosts: str = ""
    """Names, separated by commas, by which requests without a key may address the gateway,
    besides those of loopback."""
    allowed_origins: str = ""
    """Web pages that may use the gateway from a browser, separated by commas; * is all."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = _default(GatewaySettings, "max_body_bytes")
    """Largest HTTP request."""
    strict: bool = _default(GatewaySettings, "strict")
    """Whether HTTP requests with fields that are not known here are refused."""
    rate_limit: Annotated[int, msgspec.Meta(ge=0)] = _default(GatewaySettings, "rate_limit")
    """HTTP requests for answers that an address may make in a minute; 0 is any number."""
    models: str = ""
    """`ssd serve`: several models, loaded on demand: a file with a table for each, or a folder."""
    idle_unload: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds after which a model that nobody uses is unloaded; 0: never."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Most memory for all models together; 0: what the machine has free."""
    preset: PresetName = "default"
    """What HTTP requests get that do not say otherwise."""
    draft_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = _default(
        OrchestratorSettings, "draft_timeout_s"
    )
    verify_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = _default(
        OrchestratorSettings, "verify_timeout_s"
    )
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = _default(
        OrchestratorSettings, "first_timeout_s"
    )
    """Longest wait for all processes to be ready, without 60 s for each GB of weights."""
    log_level: LogLevel = "info"
    """What all processes write to their logs (`ssd logs`)."""
    hang_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = _default(
        OrchestratorSettings, "hang_timeout_s"
    )
    """Silence after which a process hangs and is replaced; more if its calls take longer."""
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 5
    """How often a service may be restarted within `restart_window_s`."""
    restart_window_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0


DRAFTER_SETTINGS = frozenset(
    {"draft_model", "draft_command", "draft_lines", "draft_server", "draft_server_key"}
)
"""What names the drafter, beside its backend."""
_OF_THE_GATEWAY = frozenset({
    "http", "host", "port", "api_key", "allowed_hosts", "allowed_origins", "max_body_bytes",
    "strict", "rate_limit", "models", "idle_unload", "memory_bytes", "preset",
})  # fmt: skip


def name_settings(settings: StackSettings) -> dict[str, Any]:
    """Those that are not as by default, by name, without what concerns HTTP alone."""
    default = msgspec.structs.asdict(StackSettings())
    given = msgspec.structs.asdict(settings)
    return {
        name: value
        for name, value in given.items()
        if value != default[name] and name not in _OF_THE_GATEWAY
    }


def stack_settings(flags: dict[str, Any]) -> StackSettings:
    """The settings in force; `flags` holds what was given on the command line.

    Raises:
        UsageError: a key is unknown or a value has the wrong type, naming where it stands.
    """
    merged = {**_from_file(Path(CONFIG_FILE)), **_from_environment(), **flags}
    return _convert(merged, "the settings")


def check_numbers(settings: StackSettings) -> None:
    """Raises UsageError for a number that processes cannot be told: it is infinite or huge."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, int | float) and not -_HUGE < value < _HUGE:
            raise UsageError(f"{name} must be below {_HUGE:.0e}")


def _convert(values: dict[str, Any], source: str) -> StackSettings:
    try:
        settings = msgspec.convert(values, StackSettings, strict=False)
        check_numbers(settings)
    except (msgspec.ValidationError, UsageError) as error:
        wrong = describe(error) if isinstance(error, msgspec.ValidationError) else str(error)
        reason = wrong.replace("there is no ", "unknown setting ")
        raise UsageError(f"{source}: {reason}") from error
    return settings


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}") from error
    _convert(values, str(path))
    return values


def _from_environment() -> dict[str, Any]:
    values = {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(_PREFIX) and name not in _OTHER_VARIABLES
    }
    _convert(values, "the environment (SSD_*)")
    return values
