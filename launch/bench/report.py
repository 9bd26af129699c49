"""The result as one self-contained page: text, tables, plots."""

import html
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from launch.bench import tables
from launch.bench.headline import describe_reading, headline
from launch.bench.plots import costs, guesses, predictions, speeds, timeline
from launch.bench.result import BenchFile
from launch.bench.runs import verdict

_STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:#1d2733;background:#fbfbf9;margin:0}
main{max-width:1120px;margin:0 auto;padding:2.2rem 1.4rem 4rem}
h1{font-size:1.9rem;margin:0 0 .2rem}h2{margin:2.4rem 0 .4rem;font-size:1.25rem}
p{max-width:46rem;margin:.5rem 0}.small{color:#5c6b73;font-size:.86rem}
.headline{font-size:1.18rem;margin:1rem 0}
.box{padding:.6rem .9rem;border-radius:6px;margin:.8rem 0;border-left:5px solid}
.good{background:#e7f3ee;border-color:#2a7f62}.bad{background:#fbe6e4;border-color:#c0504d}
.note{background:#fdf3dd;border-color:#e0a030}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;margin:.6rem 0}
th,td{padding:.28rem .55rem;text-align:right;border-bottom:1px solid #e3e6e8;white-space:nowrap}
th:first-child,td:first-child,.left td{text-align:left}th{color:#5c6b73;font-weight:600}
svg{max-width:100%;height:auto}code{background:#eef0f0;padding:.1rem .35rem;border-radius:4px;
font-size:.86rem;overflow-wrap:anywhere}dt{font-weight:600;margin-top:.5rem}dd{margin:0 0 0 1rem}
:root{color-scheme:light dark}@media (prefers-color-scheme:dark){
body{color:#e2e6ea;background:#14181d}.small,th{color:#9aa7b1}th,td{border-color:#2c343c}
.good{background:#17322a}.bad{background:#3d1f1e}.note{background:#3a2f17}code{background:#222931}
svg{filter:invert(.9) hue-rotate(180deg)}}
"""

_WORDS = {
    "target": "the model whose answer you want",
    "drafter": "a small, fast model that guesses what the target will say next",
    "ar": "plain decoding: the target makes one token after the other",
    "sd": "speculative decoding: the drafter guesses some tokens, the target verifies them all "
    "at once and keeps those that it would have said itself; then the drafter guesses again",
    "ssd": "speculative speculative decoding: while the target verifies one guess, the drafter, "
    "elsewhere, already prepares the next one for each likely outcome; if the outcome is among "
    "them (a hit), guessing has cost no time",
    "mlx-lm": "the library's own generation from the same weights; -draft: with its own "
    "speculative decoding",
    "round": "one verification by the target",
    "efficiency": "tokens per second over what these rounds would give if nothing were ever "
    "waited for (Theorem 7 of the paper); what is missing is messages and waiting",
}


def write(result: BenchFile, path: Path) -> None:
    """Write the page."""
    parts = [
        _head(result),
        _section("How fast", _speeds(result)),
        _section("Prompt by prompt", _prompts(result)),
        _section("How well it guesses", _guesses(result)),
        _section("Who works when", _timeline(result)),
        _section("What it costs here, and what was predicted", _profile(result)),
        _section("Do both models run at once?", _overlap(result)),
        _section("Words", _words()),
        _section("How it was measured", _origin(result)),
    ]
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>ssd bench</title><style>{_STYLE}</style><main>{''.join(parts)}</main></html>"
    )
    path.write_text(page, encoding="utf-8")


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body else ""


def _e(text: object) -> str:
    return html.escape(str(text))


def _head(result: BenchFile) -> str:
    target, drafter = (Path(m).name for m in (result.config.model, result.config.draft_model))
    html = f"<h1>{_e(target)}, drafted for by {_e(drafter or result.config.draft_backend)}</h1>"
    html += f"<p class=small>{_e(result.hardware.processor)}, {_e(_units(result))}</p>"
    for sentence in headline(result):
        html += f"<p class=headline>{_e(sentence)}</p>"
    if reading := describe_reading(result):
        html += f"<p>{_e(reading.capitalize())}.</p>"
    kind = {True: "good", False: "bad", None: "note"}[result.checks.lossless]
    if result.checks.lossless is False:
        sentence = (
            f"NOT LOSSLESS: {len(result.checks.divergences)} answers differ from plain decoding."
        )
    else:
        sentence = verdict(result.checks).capitalize() + "."
    return f"{html}<div class='box {kind}'>{_e(sentence)}</div>"


def _units(result: BenchFile) -> str:
    units = [f"{role} on {unit}" for role, unit in result.hardware.units.items()]
    return ", ".join([*result.hardware.gpus, *units])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    top = "".join(f"<th>{_e(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class=wide><table class='{kind}'><tr>{top}</tr>{body}</table></div>"


def _render(table: Table) -> str:
    """Render a table of the terminal."""
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    return _table((str(column.header) for column in table.columns), rows)


def _speeds(result: BenchFile) -> str:
    if not result.runs:
        return ""
    note = (
        "<p>Bars: the median over prompts of each answer's speed over that of plain decoding for "
        "the same prompt, measured in turn on the same machine. Whiskers: 95 % interval by "
        "resampling prompts. Speed leaves out the time to the first token.</p>"
    )
    legend = f"<p class=small>{_e(tables.LEGEND)}</p>"
    drafts = _render(tables.drafting(result)) + _render(tables.phases(result))
    return note + speeds(result) + _render(tables.speeds(result)) + legend + drafts


def _prompts(result: BenchFile) -> str:
    return _render(tables.prompts(result)) if result.runs else ""


def _guesses(result: BenchFile) -> str:
    if not any(s.per_position for s in result.summary.values()):
        return ""
    note = (
        "<p>Left: how often the first, second, ... token of a draft was kept. Right: how often "
        "the outcome of a verification was among the best F that had been prepared for.</p>"
    )
    after = {name: s.hit_rate_after for name, s in result.summary.items() if s.hit_rate_after}
    kinds = list(dict.fromkeys(kind for rates in after.values() for kind in rates))
    rows = [
        (name, *(f"{rates[k]:.2f}" if k in rates else "-" for k in kinds))
        for name, rates in after.items()
    ]
    head = ("hits during a round after", *({"target": "no draft"}.get(k, f"a {k}") for k in kinds))
    return note + guesses(result) + (_table(head, rows) if rows else "")


def _timeline(result: BenchFile) -> str:
    traced = [run for run in result.runs if run.timeline]
    if not traced:
        return ""
    run = max(traced, key=lambda run: (run.mode == "ssd", run.cache_hits, run.tokens))
    plot = timeline(run)
    note = (
        f"<p>Some rounds of one answer ({_e(run.prompt_id)}, {_e(run.mode)}). On the target's "
        "line, each block is a verification, with accepted / offered draft tokens; on the "
        "drafter's, each is one depth of all prepared branches.</p>"
    )
    return note + plot if plot else ""


def _profile(result: BenchFile) -> str:
    if result.profile is None or not result.profile.verify_ms:
        return ""
    profile = result.profile
    body = (
        "<p>Each model alone. Verifying several tokens at once should cost little more than one, "
        "and drafting many branches little more than one branch: that is what speculation lives "
        f"on. A message takes {profile.ipc_ms:.2f} ms; while the drafter works, the target is "
        f"{profile.contention:.0%} slower.</p>"
    )
    body += costs(profile) if profile.draft_ms else ""
    p = profile.prediction
    if p is not None:
        body += (
            f"<p>From these figures and a few short answers: <b>{_e(p.best_mode)}</b> was "
            f"predicted to be best, {p.speedup_vs_ar:.2f} times plain decoding.</p>"
        )
    return body + predictions(result)


def _overlap(result: BenchFile) -> str:
    if result.overlap is None:
        return ""
    o = result.overlap
    return (
        f"<p>Both at once is <b>{o.speed_up:.2f} times</b> as fast as in turn (2 at best); "
        f"{o.efficiency:.0%} of the shorter work was hidden.</p>"
    ) + _render(tables.overlap(o))


def _words() -> str:
    return (
        "<dl>" + "".join(f"<dt>{_e(w)}</dt><dd>{_e(m)}</dd>" for w, m in _WORDS.items()) + "</dl>"
    )


def _origin(result: BenchFile) -> str:
    c = result.config
    temperatures = ", ".join(f"{s.temperature:g}" for s in c.sampling)
    peaks: dict[str, float] = {}
    for run in result.runs:
        for name, used in run.peak_memory_gb.items():
            peaks[name] = max(peaks.get(name, 0.0), used)
    rows = [
        ("command", c.command),
        ("when", result.created),
        ("prompts", f"{c.prompts}: {len({run.prompt_id for run in result.runs})}"),
        ("answers", f"at most {c.max_tokens} tokens, {c.repeats} times"),
        ("temperature", temperatures),
        ("system", f"{result.hardware.system}, {result.hardware.cores} cores, "
                   f"{result.hardware.memory_gb:g} GB"),
        ("versions", ", ".join(f"{name} {v}" for name, v in c.versions.items())),
        ("peak memory, GB", ", ".join(f"{name} {used:.2f}" for name, used in peaks.items())),
        ("cold start, s", ", ".join(f"{name} {s:.2f}" for name, s in result.cold_start.items())),
    ]  # fmt: skip
    return _table(("", ""), rows, "left")
