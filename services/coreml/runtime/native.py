"""Converted packages under CoreML itself. macOS only; not covered by tests on other systems.

Compiled models are stored next to the package, by system version. Every load and every call has a
limit (`watchdog.py`).
"""

import logging
import platform
import time
from pathlib import Path
from typing import Any

import coremltools as ct
import msgspec
import numpy as np
from coremltools.models.compute_plan import MLComputePlan
from coremltools.models.utils import compile_model

from protocol.errors import ModelError
from protocol.process.files import PUBLIC, remove_leftovers, temporary_folder, write_atomically
from protocol.settings import ComputeUnits
from services.coreml.functions import PackageFunction
from services.coreml.manifest import Manifest
from services.coreml.runtime.blob import Array
from services.coreml.runtime.placement import Placement, joint_unit, placement_of
from services.coreml.runtime.watchdog import within

_log = logging.getLogger(__name__)

_LOAD_S = 600.0
"""The first load compiles for the Neural Engine, which takes minutes for a large model."""
_CALL_S = 20.0

_UNITS: dict[str, Any] = {
    "cpu_and_ne": ct.ComputeUnit.CPU_AND_NE,
    "cpu_only": ct.ComputeUnit.CPU_ONLY,
    "cpu_and_gpu": ct.ComputeUnit.CPU_AND_GPU,
    "all": ct.ComputeUnit.ALL,
}
_DEVICES = {
    "MLNeuralEngineComputeDevice": "ane",
    "MLGPUComputeDevice": "gpu",
    "MLCPUComputeDevice": "cpu",
}


class NativeExecutor:
    """Run a package through CoreML."""

    def __init__(self, folder: Path, manifest: Manifest, units: ComputeUnits) -> None:
        """Compile if necessary, and load every function.

        Raises:
            ModelError: CoreML refuses a function.
        """
        self._units = _UNITS[units]
        self._compiled = [_compile(folder, part.file) for part in manifest.parts]
        self._models: list[dict[str, Any]] = []
        self.load_ms: dict[str, float] = {}
        """Function -> load time of all parts together."""
        for path in self._compiled:
            loaded = {f.name: self._load(path, f) for f in manifest.functions}
            self._models.append(loaded)
        self.placements = _placements(self._compiled, manifest, units, self._units)
        self.compute_unit = joint_unit(
            self.placements[f.name] for f in manifest.functions if f.head
        )

    def _load(self, path: Path, function: PackageFunction) -> Any:
        _log.info("loading %s of %s, at most %g s", function.name, path.name, _LOAD_S)
        started = time.perf_counter()
        try:
            with within(_LOAD_S):
                model = ct.models.CompiledMLModel(str(path), self._units, function.name)
        except RuntimeError as error:
            raise ModelError(
                f"CoreML cannot load {function.name} of {str(path)!r}: {error}; if it could "
                "before, remove that folder and it is compiled again"
            ) from error
        taken = 1e3 * (time.perf_counter() - started)
        self.load_ms[function.name] = self.load_ms.get(function.name, 0.0) + taken
        return model

    def new_state(self, part: int) -> Any:
        """Return an empty state; functions of equal states share one."""
        with within(_CALL_S):
            return self._models[part]["decode"].make_state()

    def run(
        self, part: int, function: str, inputs: dict[str, Array], state: Any | None
    ) -> dict[str, Array]:
        """Run a function of the package."""
        model = self._models[part][function]
        with within(_CALL_S):
            outputs = model.predict(inputs) if state is None else model.predict(inputs, state)
        return {name: np.asarray(value) for name, value in outputs.items()}


def _cache(folder: Path) -> Path:
    build = f"{platform.mac_ver()[0]}-{platform.machine()}"
    return folder / "compiled" / build


def _compile(folder: Path, file: str) -> Path:
    """Return the compiled form of a package, made once per system version."""
    place = _cache(folder) / Path(file).with_suffix(".mlmodelc").name
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    # The watchdog ends a process that hangs, which leaves its scratch files.
    remove_leftovers(place.parent)
    with temporary_folder(place) as scratch:
        try:
            with within(_LOAD_S):
                made = compile_model(str(folder / file), str(scratch / place.name))
        except RuntimeError as error:
            raise ModelError(f"CoreML cannot compile {str(folder / file)!r}: {error}") from error
        _put(Path(made), place)
    return place


def _put(made: Path, place: Path) -> None:
    """Move into place; if two processes compile a package at once, the first one is kept."""
    try:
        made.rename(place)
    except OSError:
        if not place.exists():
            raise


def _placements(
    compiled: list[Path], manifest: Manifest, name: ComputeUnits, units: Any
) -> dict[str, Placement]:
    """Return where each function's operations run, all parts together; cached with the models."""
    kept = compiled[0].parent / f"placement-{name}.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=dict[str, Placement])
    plans = []
    for path in compiled:
        with within(_LOAD_S):
            plans.append(MLComputePlan.load_from_path(str(path), units))
    placements = {
        function.name: placement_of(
            placed for plan in plans for placed in _operation_devices(plan, function.name)
        )
        for function in manifest.functions
    }
    write_atomically(kept, msgspec.json.encode(placements), mode=PUBLIC)
    return placements


def _operation_devices(plan: Any, function: str) -> list[tuple[str, str]]:
    """Return (kind, device) of each operation of a function; constants have no device."""
    operations = plan.model_structure.program.functions[function].block.operations
    placed = []
    for operation in operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        if usage is not None:
            device = type(usage.preferred_compute_device).__name__
            placed.append((operation.operator_name, _DEVICES.get(device, device)))
    return placed
