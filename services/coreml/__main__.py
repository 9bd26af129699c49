"""`python -m services.coreml SETTINGS`: one conversion of a model to CoreML."""

import signal
import sys
from types import FrameType
from typing import NoReturn

from protocol.jobs.convert import ConvertSettings
from protocol.process.child import run_child
from services.kernels.cpu.library import load_blas


def run(settings: ConvertSettings) -> None:
    """Convert and compare, as the settings say."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    load_blas(settings.threads)
    # MLX, which the comparison needs, must be imported after the BLAS is in place.
    from services.coreml.convert.produce import produce  # noqa: PLC0415
    from services.coreml.runtime.executor import limit_threads  # noqa: PLC0415

    limit_threads(settings.threads)
    produce(settings)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Exit through the `finally` clauses, which remove incomplete files."""
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(run_child("convert", ConvertSettings, run))
