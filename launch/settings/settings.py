"""Settings of a stack: flag > environment (`SSD_*`) > `ssd.toml` > default.

Unknown keys are errors everywhere. Defaults of child processes are taken from their settings.
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
"""No setting is this large; it still fits into the wire format."""


def _default(kind: type[msgspec.Struct], name: str) -> Any:
    """Return a child process's default for a setting."""
    return next(field.default for field in msgspec.structs.fields(kind) if field.name == name)


class StackSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a stack: the pair, and the behaviour of its processes."""

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
    """Compute units of a converted model."""
    draft_weights: DraftWeights = "auto"
    """Weights of an MLX drafter: bytes on a CPU, bytes, or as they are."""
    draft_command: str = ""
    """Backend stdio: the program that drafts, with its arguments, as in a shell."""
    draft_lines: bool = False
    """Backend stdio: the program speaks the line protocol."""
    draft_server: str = ""
    """Backend remote: address of the draft server, tcp://HOST:PORT."""
    draft_server_key: str = ""
    """Backend remote: its public key, or its name in the list of trusted keys (`ssd keys`)."""
    key: str = "default"
    """Backend remote: name of our keys for it."""
    prefill_step_size: Annotated[int, msgspec.Meta(ge=1)] = _default(
        VerifierSettings, "prefill_step_size"
    )
    decode_concurrency: Annotated[int, msgspec.Meta(ge=1)] = _default(
        OrchestratorSettings, "concurrency"
    )
    """Requests decoded at the same time; others wait in line."""
    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = _default(OrchestratorSettings, "max_waiting")
    """Requests in line, beyond which more are rejected; 0 means unlimited."""
    prompt_cache_size: Annotated[int, msgspec.Meta(ge=0)] = _default(
        VerifierSettings, "prompt_cache_size"
    )
    """Finished sequences whose KV each model keeps, for others with the same prefix."""
    prompt_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(
        VerifierSettings, "prompt_cache_bytes"
    )
    """Most memory that each model may use for them."""
    prompt_cache_file: str = ""
    """File in which the target's are saved at the end and read at the start; empty: none."""
    kv_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(VerifierSettings, "kv_bytes")
    """Most memory for the target's KV of open requests; 0 is half of the free memory."""
    prefill: Prefill = "mlx"
    """Prefill by the target itself, or by its converted form where that is faster."""
    metal_kernels: MetalKernels = "auto"
    """Kernels for the few rows of a verification on Apple's GPUs: where they are faster,
    wherever they are correct, or never.
    """
    cpu_activations: CpuActivations = "int8"
    """Activations that multiply a quantised target's weights on a CPU: rounded to eight bits, or
    floats, as in mlx-lm.
    """
    target_device: Device = ""
    draft_device: Device = ""
    target_ranks: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Processes on this machine that the target is spread over."""
    hosts: str = ""
    """Machines that it is spread over: a file in the format of `mlx.launch`."""
    backend: str = ""
    """Communication between ranks; empty: the hosts file's, else nccl or ring."""
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
    """Longest accepted prompt; 0 means the context length."""
    max_prompt_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "max_prompt_bytes"
    )
    """Longest accepted prompt in bytes of text, checked before tokenisation; 0 is unlimited."""
    prompt_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = _default(
        OrchestratorSettings, "prompt_timeout_s"
    )
    """Time limit for rendering and tokenising a prompt."""
    prompt_memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "prompt_memory_bytes"
    )
    """Memory limit for that (Linux); 0 is unlimited."""
    parse_special: bool = _default(OrchestratorSettings, "parse_special")
    """Parse special tokens in the text of messages, so that the author of a message can end a
    turn and begin another.
    """
    max_stop_strings: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "max_stop_strings"
    )
    max_stop_bytes: Annotated[int, msgspec.Meta(ge=0)] = _default(
        OrchestratorSettings, "max_stop_bytes"
    )
    """Longest stop string; 0 is unlimited."""
    max_deaths: Annotated[int, msgspec.Meta(ge=1)] = _default(OrchestratorSettings, "max_deaths")
    """Deaths of a process while it works on a request after which that request is ended."""
    http: bool = False
    """Start a gateway for HTTP."""
    host: str = "127.0.0.1"
    """Listening address; a public one requires a key."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    """Listening port; 0 chooses a free one."""
    api_key: str = ""
    """Key of HTTP clients; empty admits every client that can reach the address."""
    allowed_hosts: str = ""
    """Host names, separated by commas, of requests without a key, besides those of loopback."""
    allowed_origins: str = ""
    """Origins of web pages that may use the gateway from a browser, separated by commas; * is
    all.
    """
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = _default(GatewaySettings, "max_body_bytes")
    """Largest HTTP request."""
    strict: bool = _default(GatewaySettings, "strict")
    """Reject HTTP requests with unknown fields."""
    rate_limit: Annotated[int, msgspec.Meta(ge=0)] = _default(GatewaySettings, "rate_limit")
    """HTTP generation requests per address and minute; 0 is unlimited."""
    models: str = ""
    """`ssd serve`: several models, loaded on demand: a file with a table for each, or a folder."""
    idle_unload: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Idle seconds after which a model is unloaded; 0: never."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Most memory for all models together; 0: the machine's free memory."""
    preset: PresetName = "default"
    """Sampling preset of HTTP requests without parameters."""
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
    """Log level of all processes (`ssd logs`)."""
    hang_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = _default(
        OrchestratorSettings, "hang_timeout_s"
    )
    """Silence after which a process counts as hung and is replaced; more if its calls take
    longer.
    """
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 5
    """How often a service may be restarted within `restart_window_s`."""
    restart_window_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0


DRAFTER_SETTINGS = frozenset(
    {"draft_model", "draft_command", "draft_lines", "draft_server", "draft_server_key"}
)
"""Settings that name the drafter, except its backend."""
_OF_THE_GATEWAY = frozenset({
    "http", "host", "port", "api_key", "allowed_hosts", "allowed_origins", "max_body_bytes",
    "strict", "rate_limit", "models", "idle_unload", "memory_bytes", "preset",
})  # fmt: skip


def name_settings(settings: StackSettings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, except those of HTTP."""
    default = msgspec.structs.asdict(StackSettings())
    values = msgspec.structs.asdict(settings)
    return {
        name: value
        for name, value in values.items()
        if value != default[name] and name not in _OF_THE_GATEWAY
    }


def stack_settings(flags: dict[str, Any]) -> StackSettings:
    """Return the effective settings; `flags` holds those of the command line.

    Raises:
        UsageError: a key is unknown or a value has the wrong type, with its location.
    """
    merged = {**_from_file(Path(CONFIG_FILE)), **_from_environment(), **flags}
    return _convert(merged, "the settings")


def check_numbers(settings: StackSettings) -> None:
    """Raise UsageError for a number that processes cannot receive: infinite or huge."""
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
