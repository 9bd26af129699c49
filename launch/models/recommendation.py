"""Recommended pairs by memory and purpose, with expectations that are marked as assumptions."""

import importlib.resources
import tomllib
from typing import Annotated, Literal, get_args

import msgspec

from launch.models.weights import bytes_of_kv, bytes_on_cpu
from orchestrator.learning.latency import VerifyLatency
from orchestrator.learning.schedule import ASSUMED_HITS, plan_schedule, tokens_per_round
from protocol.errors import UsageError
from protocol.heads import HeadFormat
from protocol.messages import Schedule

Purpose = Literal["try", "small", "chat", "code", "maths"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

_FILE = "pairs.toml"
_NUM_DRAFT_TOKENS = 4
_CONTEXT = 8192
"""Tokens of context whose KV must have room."""
_BUFFERS = 1.1
"""Factor on the weights: the buffers of a pass grow with the model."""
_PROCESSES_BYTES = 500_000_000
"""Interpreters and libraries of the stack's processes."""
_SHARE = 0.75
"""Share of the memory that a pair may use; the rest belongs to other programs."""

_ARCHITECTURES = {"SmolLM2": "llama", "Llama 3": "llama", "Qwen 2.5": "qwen2", "Qwen 3": "qwen3"}
"""Architectures of families, where the device makes a difference (`weights.bytes_on_cpu`)."""
_CORE_BYTES_S = 9e9
"""Memory bandwidth of one core: 0.54 GB of weights 17 times a second, measured on a Xeon."""
_SLOWEST_TOK_S = 3.0

Positive = Annotated[float, msgspec.Meta(gt=0.0)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pair of the file, whose header explains the fields."""

    model: str
    draft_model: str
    family: str
    purposes: list[Purpose]
    parameters: Positive
    draft_parameters: Positive
    kv_elements: Annotated[int, msgspec.Meta(gt=0)]
    bits: Positive
    draft_bits: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    acceptance: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)]
    measured: str = ""
    note: str = ""
    head: HeadFormat | Literal[""] = ""
    licence: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pair: list[_Entry]


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A pair, its requirements, and its expected gain."""

    model: str
    draft_model: str
    family: str
    purposes: list[Purpose]
    memory_bytes: int
    """Estimated, for both models with some context."""
    fits: bool
    """True if it fits into the memory; on a CPU, also at reading speed."""
    plain_tok_s: float
    """Estimated speed of plain decoding on a CPU; 0 elsewhere: unknown."""
    assumed_acceptance: float
    expected_tokens_per_round: float
    """Expectation with 4 draft tokens, if the assumption holds; an upper bound of the speed-up."""
    schedule: str
    """On a CPU, the planner's schedule; elsewhere empty: it depends on the drafter's device."""
    measured: str
    """Location of this project's measurements; empty: none."""
    note: str
    head: str
    """Format of the drafter, if it is a published head; empty: a model."""
    licence: str
    """Stated licence of the head; not verified: its model card is authoritative."""

    @property
    def command(self) -> str:
        """The command that sets it up."""
        if "/" not in self.model:
            return f"ssd models add {self.model}"
        return f"ssd launch --model {self.model} --draft-model {self.draft_model}"


def recommend(
    memory_bytes: int, purpose: Purpose | None = None, *, cpu_cores: int = 0
) -> list[Recommendation]:
    """Return pairs for this purpose: the largest that fit first, then those that do not fit.

    Args:
        memory_bytes: memory of the machine.
        purpose: purpose of the pairs.
        cpu_cores: cores that compute where there is no GPU, else 0. What a CPU reads in a second
            bounds the speed; of some architectures it holds float32 weights.
    """
    entries = [
        _estimate(entry, memory_bytes, cpu_cores)
        for entry in read_pairs()
        if purpose is None or purpose in entry.purposes
    ]
    return sorted(
        entries, key=lambda r: (not r.fits, -r.memory_bytes if r.fits else r.memory_bytes)
    )


def read_pairs() -> list[_Entry]:
    """Read the file shipped with this project; raise UsageError if it was damaged."""
    text = (importlib.resources.files("launch.models") / _FILE).read_text(encoding="utf-8")
    try:
        return msgspec.convert(tomllib.loads(text), _File).pair
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"{_FILE} of this installation is damaged: {error}") from error


def _estimate(entry: _Entry, memory_bytes: int, cpu_cores: int) -> Recommendation:
    weights = _weight_bytes(entry, entry.parameters, entry.bits, on_cpu=cpu_cores > 0)
    draft_bits = entry.draft_bits or entry.bits
    drafted = _weight_bytes(entry, entry.draft_parameters, draft_bits, on_cpu=cpu_cores > 0)
    both = weights + drafted
    number = bytes_of_kv(_ARCHITECTURES.get(entry.family, ""), on_cpu=cpu_cores > 0)
    kv_bytes = _CONTEXT * entry.kv_elements * number
    needed = round(both * _BUFFERS) + kv_bytes + _PROCESSES_BYTES
    speed = _CORE_BYTES_S * cpu_cores / weights
    return Recommendation(
        model=entry.model,
        draft_model=entry.draft_model,
        family=entry.family,
        purposes=entry.purposes,
        memory_bytes=needed,
        fits=needed <= _SHARE * memory_bytes and (not cpu_cores or speed >= _SLOWEST_TOK_S),
        plain_tok_s=speed,
        assumed_acceptance=entry.acceptance,
        expected_tokens_per_round=tokens_per_round(entry.acceptance, _NUM_DRAFT_TOKENS),
        schedule=describe_schedule(
            plan_by_weights(drafted / weights, entry.acceptance, shares=True), shares=True
        )
        if cpu_cores
        else "",
        measured=entry.measured,
        note=entry.note,
        head=entry.head,
        licence=entry.licence,
    )


def _weight_bytes(entry: _Entry, billions: float, bits: float, *, on_cpu: bool) -> int:
    """Return the bytes of one model's weights in this machine's memory."""
    parameters = round(billions * 1e9)
    stored = round(parameters * bits / 8)
    architecture = _ARCHITECTURES.get(entry.family, "")
    return bytes_on_cpu(architecture, parameters, stored) if on_cpu else stored


def plan_by_weights(cost: float, acceptance: float, *, shares: bool) -> Schedule:
    """Return the planner's schedule for a drafter whose token costs `cost` passes of the target.

    Further rows of a pass cost what the planner assumes until they are timed. `shares`: both
    compute on one device.
    """
    latency = VerifyLatency().of
    hits = 0.0 if shares else ASSUMED_HITS
    return plan_schedule(latency, latency, cost, acceptance, hits=hits)


def describe_schedule(schedule: Schedule, *, shares: bool) -> str:
    """Describe that schedule, and what it follows from."""
    where = "both share the device" if shares else "on a device of its own"
    assumed = f"at an acceptance of {schedule.acceptance:.2f} (assumed)"
    cost = f"a drafted token costs about {schedule.draft_ms:.2f} passes"
    return f"{cost}, {where}; {assumed}: {say_schedule(schedule)}"


def say_schedule(schedule: Schedule) -> str:
    """Return a schedule in words."""
    if schedule.way == "plain":
        return "drafts will not pay: plain decoding with prompt lookups"
    where = "hidden under verifications" if schedule.way == "in parallel" else schedule.way
    return f"drafts of {schedule.draft_tokens} {where}, {schedule.gain:.2f} times plain decoding"
