"""`python docs/lab/reading_cost.py MODEL`, on a GPU: what it costs a target that it is read.

Verifications through the verifier itself, until the outcome and the states are there, with nothing
read, three layers, and three layers projected to the target's width; interleaved, in milliseconds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from protocol.messages import FeatureRequest, OpenSequence, ReadTarget, Sampling, Verify
from services.mlx.loader import load
from services.mlx.taps import Taps
from services.runtime.warmup import warm_verifier
from services.verifier.verifier import Verifier

_ROWS = (1, 2, 4, 8)
_CONTEXT = 100
_ROUNDS, _SWEEPS = 15, 5


def _requests(verifier: Verifier, folder: Path) -> dict[str, FeatureRequest | None]:
    module = verifier._model
    count = len(module.layers)
    layers = [2, count // 2, count - 3]
    taps = Taps(module, layers)
    width = taps.width
    taps.remove()
    path = folder / "projection.safetensors"
    mx.save_safetensors(str(path), {"fc.weight": mx.random.normal((width // 3, width)) * 0.01})
    return {
        "nothing": None,
        "three layers": FeatureRequest(layers=layers),
        "projected": FeatureRequest(layers=layers, normalization="none", projection=str(path)),
    }


def _time(verifier: Verifier, rows: int) -> float:
    """Of one verification behind a short text, in milliseconds."""
    tokens = [token % 16 for token in range(_CONTEXT)]
    for _ in verifier.handle(OpenSequence(sequence=1, tokens=tokens, sampling=Sampling())):
        pass
    taken, position = [], len(tokens)
    for number in range(1, _ROUNDS + 1):
        message = Verify(
            sequence=1,
            round=number,
            position=position,
            nodes=list(range(rows)),
            parents=list(range(rows - 1)),
            drafter_idle=True,
        )
        began = time.perf_counter()
        for answer in verifier.handle(message):
            position += getattr(answer, "accepted", -1) + 1
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    verifier = Verifier(load(parser.parse_args().model), 512)
    warm_verifier(verifier)
    with tempfile.TemporaryDirectory() as folder:
        requests = _requests(verifier, Path(folder))
        found: dict[tuple[str, int], list[float]] = {}
        for sweep in range(_SWEEPS + 1):
            for number, (name, request) in enumerate(requests.items()):
                reading = ReadTarget(features=request, number=3 * sweep + number + 1)
                for _ in verifier.handle(reading):
                    pass
                for rows in _ROWS:
                    taken = _time(verifier, rows)
                    if sweep:  # the first sweep makes kernels and traces
                        found.setdefault((name, rows), []).append(taken)
    for name in requests:
        print(name, *(f"{statistics.median(found[name, rows]):.2f}" for rows in _ROWS))


if __name__ == "__main__":
    main()
