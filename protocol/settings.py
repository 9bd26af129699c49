"""Settings of the child processes: frozen, typed, unknown keys rejected.

A child gets its settings as one JSON argument. Defaults are defined here only; the command line
reads them from here (`launch/settings/settings.py`).
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import msgspec

from protocol.errors import UsageError
from protocol.process.files import remove_folder
from protocol.process.logs import LogLevel as LogLevel  # noqa: PLC0414  # a setting like the others
from protocol.process.orphans import kill_children

# Defaults that several kinds of settings share.
PREFILL_STEP_SIZE = 512
PROMPT_CACHE_SIZE = 10
PROMPT_CACHE_BYTES = 2 * 1024**3
DRAFT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 180.0

BackendName = Literal["mlx", "head", "coreml", "ngram", "stdio", "remote"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
OWN_BACKENDS = tuple(name for name in BACKENDS if name not in {"ngram", "stdio", "remote"})
"""Backends that draft in one of our processes; `ngram` (prompt lookup) needs none."""

ComputeUnits = Literal["auto", "cpu_and_ne", "cpu_only", "cpu_and_gpu", "all", "reference"]
"""Compute units of a converted model, in CoreML's terms; `reference` is a slow numpy runtime for
tests that runs anywhere. `auto`: the Neural Engine on macOS, elsewhere the reference.
"""

Prefill = Literal["mlx", "coreml", "coreml-always"]
"""Runtime of the target's prefill; `coreml` where that was measured to be faster."""

MetalKernels = Literal["auto", "on", "off"]
"""Kernels for few rows on Apple's GPUs: where faster, wherever correct, or never."""

CpuActivations = Literal["int8", "float"]
"""Activations that multiply a quantised target's weights on a CPU. int8: rounded in groups of 32
as in llama.cpp; float: as in mlx-lm, which is slower.
"""

DraftWeights = Literal["auto", "int8", "int4", "float"]
"""Weights of an MLX drafter. int8, int4: rounded to eight or four bits, which are read faster and
draft almost as well; float: as loaded. `auto`: on a CPU int8, of large drafters int4.
"""

MANY_DRAFT_WEIGHTS = 200_000_000
"""Weights above which `auto` rounds a drafter to four bits on a CPU: smaller ones lose by it."""

FREQUENT_TOKENS = 16_000
"""Most tokens that a drafter proposes, except on CUDA: the first of `draft_head.json`, which are
the most frequent. On two cores 32,000 are 5 % slower (docs/lab/drafter-training.md).
"""

Device = Annotated[str, msgspec.Meta(pattern=r"^(|cpu|gpu|cuda:[0-9]+)$")]
"""Device of a process: cpu, gpu, cuda:N (one GPU of several), or empty for MLX's default."""


RankBackend = Literal["ring", "jaccl", "jaccl-ring", "nccl"]
"""Communication of the ranks of a group: the backends of `mx.distributed`."""
RANK_BACKENDS: tuple[RankBackend, ...] = get_args(RankBackend)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all settings: immutable, strict."""


class ChildSettings(Settings, frozen=True, kw_only=True):
    """Settings of every child."""

    lifeline: int
    """File descriptor that reaches end of file when the supervisor is gone."""
    cores: list[int] = []
    """Linux: the cores this process is pinned to; empty leaves it free."""
    log_level: LogLevel = "info"
    """Level of its log."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the child inherits."""
        return (self.lifeline,)

    @property
    def shutdown_timeout_s(self) -> float:
        """Time limit for the shutdown after SIGTERM."""
        return 2.0

    def on_orphaned(self) -> None:
        """Clean up because the supervisor cannot."""


class ServiceSettings(ChildSettings, frozen=True, kw_only=True):
    """Common settings of verifier and drafter."""

    address: str
    """Address at which the orchestrator listens for services."""
    model: str = ""
    """Folder of the model."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    """BLAS threads on Linux."""
    device: Device = ""
    idle_flag: str = ""
    """File in which it reports that it is idle; empty: no process reads it."""
    spare_cores: list[int] = []
    """Linux: the other service's cores, which it uses while that service is idle."""
    spare_flag: str = ""
    """File in which that service reports it."""
    prefill_step_size: Annotated[int, msgspec.Meta(ge=1)] = PREFILL_STEP_SIZE
    prompt_cache_size: Annotated[int, msgspec.Meta(ge=0)] = PROMPT_CACHE_SIZE
    """Number of finished sequences whose KV is cached, for others with the same prefix."""
    prompt_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = PROMPT_CACHE_BYTES
    """Most memory for them."""


RankSplit = list[Annotated[int, msgspec.Meta(ge=1)]] | Literal["auto"]
"""Pipelined: layers per rank; auto: chosen by measurements on each. Empty: tensor-parallel, or
an even pipeline if the model supports only that.
"""


class RankHost(Settings, frozen=True, kw_only=True):
    """The host of one rank of a group."""

    name: str = "127.0.0.1"
    """Its name for ssh."""
    is_local: bool = True
    """True if it is this machine, where no ssh is needed."""
    ips: list[str] = []
    """Its addresses on the network over which the ranks exchange arrays."""
    rdma: list[str | list[str] | None] = []
    """jaccl: its RDMA device towards each rank; null towards itself."""
    environment: dict[str, str] = {}
    """Environment variables for this rank alone."""
    cores: list[int] = []
    """Linux, this machine: the cores that the rank is pinned to; empty: not pinned."""


class RankGroupSettings(Settings, frozen=True, kw_only=True):
    """A model that is spread over several processes, the ranks of `mx.distributed`."""

    hosts: Annotated[list[RankHost], msgspec.Meta(min_length=2)]
    """One per rank; the first one is this process."""
    backend: RankBackend = "ring"
    split: RankSplit = []
    python: str = ""
    """The interpreter on other machines; empty: the path of this one's."""
    environment: dict[str, str] = {}
    """Environment variables for all ranks."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """First port on other machines; on this one the ring uses free ones."""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)]
    """Longest wait for a host's first message."""
    meet_timeout_s: Annotated[float, msgspec.Meta(gt=0)]
    """Longest wait for all ranks to connect."""
    silence_timeout_s: Annotated[float, msgspec.Meta(gt=0)]
    """Silence after which a rank is lost, and the group ends."""

    def ranks_beside(self, rank: int) -> int:
        """Return the number of ranks on the machine of this rank, itself included."""
        host = self.hosts[rank]
        return sum(
            other.is_local if host.is_local else not other.is_local and other.name == host.name
            for other in self.hosts
        )


class VerifierSettings(ServiceSettings, frozen=True, kw_only=True):
    """One verifier process."""

    prefill: Prefill = "mlx"
    prefill_model: str = ""
    """Folder of the converted target, unless `prefill` is mlx."""
    compute_units: ComputeUnits = "auto"
    """Compute units of the converted target."""

    metal_kernels: MetalKernels = "auto"
    cpu_activations: CpuActivations = "int8"
    kv_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Most memory for the KV of open sequences; 0 is half of the free memory after loading."""
    adapter: str = ""
    """Folder of the target's LoRA adapter; empty without one."""
    prompt_cache_file: str = ""
    """File in which the KV of finished sequences outlives the process; empty: none."""
    prelaunches: bool = False
    """Launch passes that wait for their tokens on the GPU, if no drafter computes there."""
    ranks: RankGroupSettings | None = None
    """The group whose rank 0 this process is; None: the whole model is in this process."""

    @property
    def shutdown_timeout_s(self) -> float:
        """Time limit that allows for writing gigabytes."""
        return 20.0 if self.prompt_cache_file else super().shutdown_timeout_s


class DrafterSettings(ServiceSettings, frozen=True, kw_only=True):
    """One drafter process."""

    backend: BackendName
    target: str = ""
    """Folder of the target, for the head backend."""
    compute_units: ComputeUnits = "auto"
    """Compute units of the coreml backend."""
    weights: DraftWeights = "auto"
    """Weights of the mlx backend."""
    command: list[str] = []
    """Backend stdio: the program that drafts, and its arguments."""
    lines: bool = False
    """Backend stdio: the program speaks the line protocol, not messages."""
    server: str = ""
    """Backend remote: the address of the draft server, tcp://HOST:PORT."""
    server_key: str = ""
    """Backend remote: its public key."""
    key_file: str = ""
    """Backend remote: the file of our keys, since arguments are visible to everyone."""
    ready_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = START_TIMEOUT_S
    """stdio and remote: longest wait for the drafter to be ready, or to prefill."""
    answer_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = DRAFT_TIMEOUT_S
    """stdio and remote: longest wait for an awaited draft; then the drafter has hung."""


class OrchestratorSettings(ChildSettings, frozen=True, kw_only=True):
    """The orchestrator process."""

    services_address: str
    clients_address: str
    run_dir: str
    """Private folder of this stack's sockets and logs."""
    model: str
    """Folder of the target model, for its tokenizer and chat template."""
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 4
    """Requests decoded at the same time; others wait in line."""
    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = 64
    """Requests in line, beyond which more are rejected; 0 means unlimited."""
    max_prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Longest accepted prompt; 0 means the context length."""
    max_prompt_bytes: Annotated[int, msgspec.Meta(ge=0)] = 2 * 1024**2
    """Longest accepted prompt in bytes of text, checked before tokenisation; 0 is unlimited."""
    prompt_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Time limit for rendering and tokenising a prompt."""
    prompt_memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 2 * 1024**3
    """Memory limit for that (Linux); 0 is unlimited."""
    parse_special: bool = False
    """Parse special tokens in the text of messages."""
    max_stop_strings: Annotated[int, msgspec.Meta(ge=0)] = 64
    max_stop_bytes: Annotated[int, msgspec.Meta(ge=0)] = 4096
    """Longest stop string."""
    max_deaths: Annotated[int, msgspec.Meta(ge=1)] = 2
    """Deaths of a process while it works on a request after which that request is ended."""
    draft_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = DRAFT_TIMEOUT_S
    """Longest wait for a draft while the target idles; usually much shorter (`timeouts.py`)."""
    verify_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Longest wait for the verifier's answer, prefill included, before the request fails. A
    service that reports progress (a long prefill) gets more.
    """
    hang_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    """Silence after which a service has hung; more if its calls are slow (`hang_detector.py`)."""
    first_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = START_TIMEOUT_S
    """The same limit before a service's first result, which may include compiling and loading."""
    lookup_only: bool = False
    """Use no drafter: prompt lookup drafts alone."""

    def on_orphaned(self) -> None:
        """Kill stuck children and remove the run folder: the supervisor cannot."""
        kill_children(Path(self.run_dir))
        remove_folder(Path(self.run_dir))


class TextWorkerSettings(ChildSettings, frozen=True, kw_only=True):
    """A process that tokenises long prompts for the orchestrator, or checks grammars."""

    model: str
    """Folder of the target model."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Memory limit for prompts or grammars; 0 is unlimited."""
    parse_special: bool = False
    """Parse special tokens in the text of messages."""
    checks_grammars: bool = False
    """True to check grammars instead of tokenising prompts."""


Precision = Literal["auto", "float32", "bfloat16", "float16"]

S = TypeVar("S", bound=Settings)


def encode_settings(settings: Settings) -> str:
    """Encode settings as the one JSON argument of a child."""
    return msgspec.json.encode(settings).decode()


def decode_settings(argument: str, kind: type[S]) -> S:
    """Decode a child's argument; raise UsageError naming an invalid field."""
    try:
        return msgspec.json.decode(argument, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"{kind.__name__}: {error}") from error
