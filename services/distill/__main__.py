"""`python -m services.distill SETTINGS`: one distillation, or one evaluation of a drafter."""

import sys

from protocol.jobs.distill import DistillSettings
from protocol.process.child import run_child
from services.distill.run_control import RunControl
from services.kernels.cpu.library import load_blas
from services.mlx.lean_imports import leave_out_unused_libraries


def run(settings: DistillSettings) -> None:
    """Distil or evaluate, as the settings say."""
    control = RunControl(60 * settings.session_minutes)
    control.listen()
    load_blas(settings.threads)
    leave_out_unused_libraries()
    # MLX must be imported after the BLAS is in place.
    from services.distill.phases import distill, judge  # noqa: PLC0415

    (judge if settings.evaluate_only else distill)(settings, control)


if __name__ == "__main__":
    sys.exit(run_child("distill", DistillSettings, run))
