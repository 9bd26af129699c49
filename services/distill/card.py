"""The report of a run: `distill.json` for programs, and the model card for readers."""

from pathlib import Path

import msgspec

from protocol.errors import RuntimeFailure
from protocol.jobs.distill import DistillSettings
from protocol.process.files import PUBLIC, write_atomically
from services.distill.checkpoint import LogEntry
from services.distill.evaluation import Figures
from services.distill.speed import Costs, SpeedUpPrediction

FILE_NAME = "distill.json"


class DistillReport(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about a run and its drafter."""

    schema_version: int = 1
    target: str
    compute_unit: str
    layers: list[int]
    """Layers of the target that the drafter started from."""
    parameters: int
    """Number of trained parameters."""
    head_size: int
    """Number of tokens that the drafter can propose."""
    training_tokens: int
    validation_sequences: int
    generation_seconds: float
    training_seconds: float
    peak_memory_gb: float
    """MLX's peak memory in the last call of the run."""
    steps: int
    figures: Figures
    costs: Costs
    prediction: SpeedUpPrediction
    settings: DistillSettings
    log: list[LogEntry]


def write(out: Path, report: DistillReport) -> None:
    """Write both files; raises RuntimeFailure if writing fails."""
    try:
        figures = msgspec.json.format(msgspec.json.encode(report), indent=1)
        write_atomically(out / FILE_NAME, figures, mode=PUBLIC)
        write_atomically(out / "README.md", card(report), mode=PUBLIC)
    except OSError as error:
        raise RuntimeFailure(f"cannot write the report to {str(out)!r}: {error}") from error


def card(report: DistillReport) -> str:
    """Return the model card, in Markdown."""
    name = Path(report.target).name
    settings = report.settings
    budget = f"{report.steps} steps, {report.training_seconds / 60:.1f} minutes"
    return f"""# A drafter for {name}

Distilled with `ssd distill` from the target's own texts: layers {report.layers} of the
target, trained on its full next-token distribution. Embedding and head are the target's.

```
ssd generate "..." --model {settings.target} --draft-model {settings.out}
ssd distill --evaluate {settings.out} --target {settings.target} --prompts FILE.jsonl
```

The second command recomputes greedy agreement on prompts of your own.

| | |
|---|---|
| trained parameters | {report.parameters:,} |
| tokens it can propose | {report.head_size:,} |
| texts | {report.training_tokens:,} answer tokens, {report.generation_seconds / 60:.1f} minutes |
| training | {budget}, on {report.compute_unit} |
| held out | {report.validation_sequences} sequences, {report.figures.positions:,} tokens |

## Held-out figures

{_figures(report.figures)}

## On the machine it was made on

{_costs(report.costs, report.prediction)}
"""


def _figures(figures: Figures) -> str:
    lines = [
        "| | |",
        "|---|---|",
        f"| greedy agreement, {figures.greedy_positions} tokens | {figures.greedy_agreement:.3f} |",
        *(f"| ... {name} | {value:.3f} |" for name, value in figures.by_category.items()),
    ]
    for one in figures.acceptance:
        lines.append(f"| acceptance at T={one.temperature}, rejection rule | {one.rejection:.3f} |")
        lines.append(f"| acceptance at T={one.temperature}, coupled rule | {one.coupled:.3f} |")
    widths = list(figures.hits)
    lines += [
        "",
        f"| target's token in the drafter's best F | {' | '.join(widths)} |",
        f"|---|{'---|' * len(widths)}",
        f"| all | {' | '.join(f'{figures.hits[w]:.3f}' for w in widths)} |",
        "| after a rejection | "
        + " | ".join(f"{figures.hits_after_rejection[w]:.3f}" for w in widths)
        + " |",
    ]
    return "\n".join(lines)


def _costs(costs: Costs, prediction: SpeedUpPrediction) -> str:
    verify = ", ".join(f"T_v({m}) {value:.2f} ms" for m, value in costs.verify_ms.items())
    draft = ", ".join(f"T_d({b}) {value:.2f} ms" for b, value in costs.draft_ms.items())
    if not prediction.num_draft_tokens:
        plan = "With these costs plain decoding is faster than any plan."
    else:
        plan = (
            f"Predicted: {prediction.speed_up:.2f} times plain decoding with "
            f"{prediction.num_draft_tokens} draft tokens and {prediction.branches} branches "
            f"(hit rate {prediction.hit_rate:.2f})."
        )
    return f"{verify}; {draft}.\n\n{plan} Each was timed alone; measure with `ssd bench`."
