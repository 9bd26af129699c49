"""The statistics of an answer for `--stats`."""

from collections.abc import Iterator

import psutil
from rich.table import Table

from protocol.client.client import Client
from protocol.messages import Finished, Origin, Statistics

DRAFTER: tuple[Origin, ...] = ("hit", "miss")
"""Origins of a drafter's tokens; lookups are not its merit."""

_JUST_NOW_S, _MINUTE_S = 2.0, 60.0


def statistics_table(
    finished: Finished, tokens: int, *, memory: str = "", details: bool = False
) -> Table:
    """Build the statistics of one answer of `tokens` tokens; with `details`, of its rounds too."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = list(_rows(finished, tokens))
    if memory:
        rows.append(("peak memory", memory))
    if details:
        rows += _details(finished.statistics)
    for name, value in rows:
        table.add_row(name, value)
    return table


def count_accepted(s: Statistics, origins: tuple[Origin, ...]) -> tuple[int, int]:
    """Return how many draft tokens of these origins were accepted, and how many verified."""
    by_origin = [s.by_origin[origin] for origin in origins if origin in s.by_origin]
    return sum(kind.accepted for kind in by_origin), sum(kind.drafted for kind in by_origin)


def is_comparable(s: Statistics) -> bool:
    """Return whether the speed of plain decoding was measured under this answer's conditions.

    A verification takes no less time than a plain pass, so an answer cannot be faster than plain
    decoding by more than its tokens per round: if it seems to be, the machine was slower or the
    context longer when plain decoding was measured.
    """
    return 0.0 < s.tok_s <= s.plain_tok_s * s.mean_acceptance_length


def describe_lags(offered: list[int], accepted: list[int]) -> str:
    """Describe the acceptance rate at each lag, from 1."""
    pairs = enumerate(zip(offered, accepted, strict=True), 1)
    return " ".join(f"{lag}: {kept / count:.2f}" for lag, (count, kept) in pairs if count)


def describe_age(seconds: float) -> str:
    """Describe the age of a measurement in words."""
    if seconds < _JUST_NOW_S:
        return "just now"
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s ago"
    return f"{seconds / _MINUTE_S:.0f} min ago"


def peak_memory(client: Client) -> str:
    """Describe the services' peak memory; empty if the system does not report it."""
    services = sorted(client.status().services, key=lambda service: service.role, reverse=True)
    peaks = {service.role: _peak_bytes(service.pid) / 1e9 for service in services}
    if not all(peaks.values()):
        return ""
    each = ", ".join(f"{role} {gigabytes:.2f}" for role, gigabytes in peaks.items())
    return f"{sum(peaks.values()):.2f} GB ({each})"


def _peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process, or else its current one."""
    try:
        process = psutil.Process(pid)
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:  # noqa: PTH123
            peak = next((line for line in lines if line.startswith("VmHWM:")), "")
        return 1024 * int(peak.split()[1]) if peak else process.memory_info().rss
    except OSError:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _rows(finished: Finished, tokens: int) -> Iterator[tuple[str, str]]:
    s = finished.statistics
    yield "prompt", _describe_prompt(finished)
    yield "answer", f"{tokens} tokens, {s.tok_s:.1f} tok/s ({s.decode_s:.2f} s)"
    yield "first token", f"after {s.ttft_ms:.0f} ms"
    if s.drafted and is_comparable(s):
        plain = f"{s.plain_tok_s:.1f} tok/s, measured {describe_age(s.plain_age_s)}"
        yield "times plain", f"{s.tok_s / s.plain_tok_s:.2f} (plain decoding: {plain})"
    accepted, drafted = count_accepted(s, DRAFTER)
    by = f" ({s.drafter})" if s.drafter else ""
    yield "drafts", (f"{_share(accepted, drafted)} accepted" if drafted else "none verified") + by
    if s.state_bytes and s.rounds:
        yield "states read", f"{s.state_bytes / s.rounds / 1e3:.1f} kB a round"
    accepted, drafted = count_accepted(s, ("lookup",))
    if drafted:
        yield "prompt lookup", f"{_share(accepted, drafted)} accepted"
    if s.tree_rounds:
        trees = f"in {s.tree_rounds} of {s.rounds} rounds"
        yield "trees", f"{trees}; {s.branch_tokens} tokens from side branches"
    if s.rounds:
        yield "tokens per round", f"{s.mean_acceptance_length:.2f} ({s.rounds} rounds)"
    if prepared := s.cache_hits + s.cache_misses:
        yield "cache hits", _share(s.cache_hits, prepared)
    if s.overlap_ratio:
        yield "drafting hidden", f"{s.overlap_ratio:.0%}"
    if s.drafter_restarts or s.verifier_restarts:
        yield "restarts", f"drafter {s.drafter_restarts}, verifier {s.verifier_restarts}"


def _describe_prompt(finished: Finished) -> str:
    text = f"{finished.prompt_tokens} tokens"
    if finished.cached_tokens:
        text += f", {finished.cached_tokens} of them cached"
    milliseconds = finished.statistics.phase_ms.get("prefill_verifier", 0.0)
    if finished.prefilled_tokens and milliseconds:
        text += f", {1e3 * finished.prefilled_tokens / milliseconds:.1f} tok/s"
    return text


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.2f})"


def _details(s: Statistics) -> Iterator[tuple[str, str]]:
    if s.per_position:
        yield "by position", " ".join(f"{rate:.2f}" for rate in s.per_position)
    if s.offered_by_lag:
        yield "by lag", describe_lags(s.offered_by_lag, s.accepted_by_lag)
    names = sorted(s.phase_ms, key=_natural)
    yield "per round, median ms", ", ".join(f"{name} {s.phase_ms[name]:.2f}" for name in names)
    if s.plain_rounds:
        yield "plain rounds", f"{s.plain_rounds} of {s.rounds}"
    if s.fallbacks:
        yield "without a ready draft", ", ".join(f"{k} {n}" for k, n in s.fallbacks.items())
    if s.stale_trees:
        yield "late messages", f"{s.stale_trees} of the drafter's were dropped"


def _natural(name: str) -> tuple[str, int]:
    """Return a sort key that puts `verify_10` after `verify_2`."""
    word, _, number = name.rpartition("_")
    return (word, int(number)) if number.isdecimal() else (name, 0)
