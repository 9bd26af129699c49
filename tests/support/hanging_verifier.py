"""A verifier whose main thread hangs in its fifth verification, as in a driver; the next is sane.

Run as `python -m tests.support.hanging_verifier SETTINGS`, in place of services.verifier.main.
"""

import sys
import time
from pathlib import Path
from typing import Any

from protocol.messages import Verify
from protocol.process.child import run_child
from protocol.settings import VerifierSettings
from services.verifier import main as verifier

_FIFTH = 5


def _hang_once(folder: Path) -> None:
    from services.verifier.acceptance import AcceptanceRule  # noqa: PLC0415  # MLX comes after the BLAS

    honest, calls = AcceptanceRule.accept, [0]

    def judged(rule: Any, logits: Any, message: Verify, *rest: Any) -> Any:
        calls[0] += message.sequence > 0  # what is timed at load is sequence 0
        if calls[0] == _FIFTH and not (folder / "hung").exists():
            (folder / "hung").touch()
            while True:
                time.sleep(1e9)
        return honest(rule, logits, message, *rest)

    AcceptanceRule.accept = judged  # type: ignore[method-assign]  # that is the fault


def run(settings: VerifierSettings) -> None:
    """An honest verifier but for one hang; `hung` in the model's folder says that it happened."""
    load = verifier.load_blas

    def then_break(threads: int) -> None:
        load(threads)
        _hang_once(Path(settings.model))

    verifier.load_blas = then_break
    verifier.run(settings)


if __name__ == "__main__":
    sys.exit(run_child("verifier", VerifierSettings, run))
