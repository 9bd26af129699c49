"""The screen of `ssd top`. Pure: from figures to a rich renderable."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launch.models.names import name_of_folder
from launch.stack.snapshot import ProcessFigures, StackSnapshot
from launch.terminal.statistics import describe_age
from protocol.messages import (
    ModelState,
    ModelStatus,
    PlannerState,
    RankStatus,
    SequenceStatus,
    Status,
    WindowStats,
)

_BARS = "▁▂▃▄▅▆▇█"
_STATES = {"running": "green", "starting": "yellow", "stopped": "yellow", "gone": "yellow"}

_MODEL_STATES: dict[ModelState, str] = {
    "unloaded": "dim",
    "loading": "yellow",
    "loaded": "green",
    "unloading": "yellow",
    "failed": "red",
}


def draw(snapshot: StackSnapshot, speeds: Sequence[float], hint: str) -> RenderableType:
    """Draw the whole screen; `speeds` are the last tok/s, oldest first."""
    parts: list[RenderableType] = [_head(snapshot, hint), _processes(snapshot.processes)]
    if snapshot.models:
        parts.append(_models(snapshot.models))
    if snapshot.status is not None:
        parts += [_ranks(service.ranks) for service in snapshot.status.services if service.ranks]
        parts += [_speculation(snapshot.status, speeds), _sequences(snapshot.status)]
    parts += [Text(sentence, style="yellow") for sentence in _sentences(snapshot)]
    return Group(*parts)


def _head(snapshot: StackSnapshot, hint: str) -> RenderableType:
    model = name_of_folder(snapshot.status.model) if snapshot.status else "?"
    if snapshot.models:
        model = f"{len(snapshot.models)} models"
    return Text.assemble(
        ("ssd top", "bold"),
        f"  stack {snapshot.name}, {model}, up {format_duration(snapshot.uptime_s)}, "
        f"{format_bytes(snapshot.free_memory_bytes)} of memory free  ",
        (hint, "dim"),
    )


def _processes(processes: Iterable[ProcessFigures]) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    for name in ("process", "pid", "state", "restarts", "memory", "CPU", "up", "backend"):
        right = name in {"pid", "restarts", "memory", "CPU", "up"}
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("model", ratio=1, no_wrap=True)  # it yields on a narrow screen
    for p in processes:
        where = f"{p.backend} on {p.device}" if p.backend and p.device else p.backend
        table.add_row(
            p.role,
            str(p.pid),
            Text(p.state, style=_STATES.get(p.state, "red")),
            Text(str(p.restarts), style="yellow" if p.restarts else ""),
            format_bytes(p.memory_bytes),
            f"{p.cpu_percent:.0f} %",
            format_duration(p.uptime_s),
            where or "-",
            name_of_folder(p.model) or "-",
        )
    return Panel(table, title="processes", title_align="left", border_style="dim")


def _models(models: Sequence[ModelStatus]) -> RenderableType:
    """Draw the models of a server, and the name of each one's stack."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    for name in ("model", "state", "memory", "answering", "waiting", "look at it"):
        right = name in {"memory", "answering", "waiting"}
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("note", ratio=1)
    for model in models:
        table.add_row(
            model.name,
            Text(model.state, style=_MODEL_STATES[model.state]),
            format_bytes(model.memory_bytes) if model.memory_bytes else "-",
            str(model.answering),
            str(model.waiting),
            f"ssd top --name {model.stack}" if model.state == "loaded" else "-",
            model.note,
        )
    return Panel(table, title="models", title_align="left", border_style="dim")


def _ranks(ranks: Sequence[RankStatus]) -> RenderableType:
    """Draw the processes that the target is spread over, and the links between them."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("host", ratio=1, no_wrap=True, min_width=8)
    for name in ("pid", "layers", "weights", "free", "a pass", "latency", "link"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in ranks:
        table.add_row(
            str(rank.rank),
            rank.host,
            str(rank.pid),
            rank.part,
            format_bytes(rank.weight_bytes),
            format_bytes(rank.free_bytes),
            f"{rank.pass_ms:.1f} ms",
            f"{rank.latency_ms:.2f} ms",
            f"{format_bytes(int(1e6 * rank.mbytes_per_s))}/s",
        )
    return Panel(table, title="the target's ranks", title_align="left", border_style="dim")


def _speculation(status: Status, speeds: Sequence[float]) -> RenderableType:
    recent = status.window
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("requests", f"{status.active} running, {status.waiting} waiting")
    table.add_row("speed", Text.assemble(_speed(recent), "  ", (sparkline(speeds), "green")))
    table.add_row("acceptance", _share(recent.acceptance_rate, recent.accepted, recent.drafted))
    looked_up = recent.cache_hits + recent.cache_misses
    table.add_row("cache hits", _share(recent.hit_rate, recent.cache_hits, looked_up))
    table.add_row("rounds", f"{recent.rounds}, {recent.plain_rounds} of them plain")
    table.add_row("planner", format_plan(status.planner))
    title = f"the last {recent.seconds:.0f} s"
    return Panel(table, title=title, title_align="left", border_style="dim")


def _speed(recent: WindowStats) -> str:
    return f"{recent.tok_s:.1f} tok/s" if recent.busy_s else "idle"


def _share(rate: float, part: int, whole: int) -> str:
    return f"{rate:.2f} ({part} of {whole})" if whole else "-"


def format_plan(choice: PlannerState) -> str:
    """Describe the planner's choice in words."""
    speeds = []
    if choice.speculative_tok_s:
        speeds.append(f"speculating {choice.speculative_tok_s:.1f} tok/s")
    if choice.plain_tok_s:
        age = describe_age(choice.plain_age_s)
        speeds.append(f"plain {choice.plain_tok_s:.1f} tok/s ({age})")
    measured = f"; measured {', '.join(speeds)}" if speeds else ""
    if not choice.speculating:
        return f"plain decoding{measured}"
    width = f", {choice.branches} branches" if choice.branches else ""
    return f"speculates, up to {choice.num_draft_tokens} draft tokens{width}{measured}"


def _sequences(status: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    table.add_column("no.", justify="right", no_wrap=True)
    table.add_column("waits for", no_wrap=True)
    for name in ("age", "prompt", "cached", "tokens", "tok/s", "accepted", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", ratio=1)
    for row in status.sequences:
        table.add_row(*_row(row))
    title = f"sequences ({status.active} running)"
    content = table if status.sequences else Text("none", style="dim")
    return Panel(content, title=title, title_align="left", border_style="dim")


def _row(row: SequenceStatus) -> list[str]:
    choice = row.planner
    width = f" x {choice.branches}" if choice.branches else ""
    plan = f"{choice.mode} {choice.num_draft_tokens}{width}" if choice.speculating else "plain"
    prompt = str(row.prompt_tokens)
    if row.state == "prefill" and row.computed_tokens:
        prompt = f"{row.computed_tokens} of {prompt}"
    return [
        str(row.sequence),
        row.state if row.state != "stranded" else "a verifier",
        format_duration(row.age_s),
        prompt,
        str(row.cached_tokens),
        str(row.tokens),
        f"{row.tok_s:.1f}",
        f"{row.acceptance_rate:.2f}",
        f"{row.hit_rate:.2f}",
        plan,
    ]


def _sentences(snapshot: StackSnapshot) -> list[str]:
    status = snapshot.status
    if status is None:
        return snapshot.problems
    preparing = [
        f"the {service.role} prepares {service.preparation.stage} between requests: "
        f"{service.preparation.done} of {service.preparation.total} stages done"
        for service in status.services
        if not service.preparation.is_complete
    ]
    refused = [f"the last {role} was refused: {why}" for role, why in status.refused.items()]
    return [
        *snapshot.problems,
        *status.degraded,
        *preparing,
        *refused,
        *status.marked_for_kill.values(),
    ]


def sparkline(values: Sequence[float]) -> str:
    """Return a line of bars, the highest value full."""
    top = max(values, default=0.0)
    if top <= 0.0:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(len(_BARS) * v / top))] for v in values)


def format_bytes(count: int) -> str:
    """Format bytes in a readable unit."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} m {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} m"
