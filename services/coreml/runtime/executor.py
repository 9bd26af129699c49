"""Executors of a converted model: CoreML on macOS, the reference runtime elsewhere."""

import sys
from pathlib import Path
from typing import Any, Protocol

from threadpoolctl import threadpool_limits

from protocol.errors import UsageError
from protocol.settings import ComputeUnits
from services.coreml.manifest import Manifest
from services.coreml.runtime.blob import Array
from services.coreml.runtime.program import Precision, Program

State = Any
"""Keys and values of one sequence, in the executor's own form."""


class PackageExecutor(Protocol):
    """Executes the packages of one converted model."""

    @property
    def compute_unit(self) -> str:
        """The device that computes, if known, rather than the requested one."""
        ...

    def new_state(self, part: int) -> State:
        """Return an empty state for one part of the model."""
        ...

    def run(
        self, part: int, function: str, inputs: dict[str, Array], state: State | None
    ) -> dict[str, Array]:
        """Call a function of a part; updates the state as the function declares."""
        ...


class ReferenceExecutor:
    """Runs the packages in numpy: exact in meaning and rounding, without relation to speed."""

    compute_unit = "reference"

    def __init__(self, folder: Path, manifest: Manifest, precision: Precision = "float16") -> None:
        self._programs = [Program(folder / part.file, precision) for part in manifest.parts]
        self._stateful = next((f.name for f in manifest.functions if f.stateful), "")

    def new_state(self, part: int) -> State:
        """Return an empty state for a function."""
        return self._programs[part].new_state(self._stateful)

    def run(
        self, part: int, function: str, inputs: dict[str, Array], state: State | None
    ) -> dict[str, Array]:
        """Run a function of the package."""
        return self._programs[part].run(function, inputs, {} if state is None else state)


def executor_of(folder: Path, manifest: Manifest, units: ComputeUnits) -> PackageExecutor:
    """Return the executor for these units; `auto`: Neural Engine on macOS, else the reference.

    Raises:
        UsageError: CoreML is requested where there is none.
    """
    if units == "reference" or (units == "auto" and sys.platform != "darwin"):
        return ReferenceExecutor(folder, manifest)
    if sys.platform != "darwin":
        raise UsageError(
            f"compute_units={units} needs CoreML, which only macOS has; here: reference"
        )
    # Its framework exists only there.
    from services.coreml.runtime.native import NativeExecutor  # noqa: PLC0415

    return NativeExecutor(folder, manifest, "cpu_and_ne" if units == "auto" else units)


def limit_threads(threads: int) -> None:
    """Limit numpy's BLAS to this many threads.

    It counts the machine's cores when it is loaded, before this process is pinned to its own, and
    threads that share a core wait for each other.
    """
    threadpool_limits(limits=threads, user_api="blas")
