"""The side towards CoreML, with the reference runtime in CoreML's place: all but CoreML itself."""

import inspect
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.models.compute_plan import MLComputePlan
from coremltools.models.utils import compile_model

from protocol.errors import ModelError
from services.coreml.manifest import read_manifest
from services.coreml.model import ConvertedModel, chain_feed
from services.coreml.prefill import CoremlPrefill
from services.coreml.runtime import native
from services.coreml.runtime.native import NativeExecutor
from services.coreml.runtime.program import Program
from tests.support.converted import converted_folder, converted_model

TOKENS = [5, 9, 200, 31, 7]
OPERATIONS = Counter({"conv": 30, "add": 70})


class Devices:
    """Stands for coremltools on a Mac; counts what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: Counter[str] = Counter()
        self.elsewhere: tuple[str, ...] = ()
        """Kinds of operations that run on the CPU."""
        self.refuses = ""
        monkeypatch.setattr(native, "compile_model", self.compile)
        monkeypatch.setattr(native, "MLComputePlan", SimpleNamespace(load_from_path=self.plan))
        monkeypatch.setattr(ct.models, "CompiledMLModel", self.load)

    def compile(self, package: str, destination: str) -> str:
        self.asked["compile"] += 1
        Path(destination).mkdir()
        (Path(destination) / "package").write_text(package)
        return destination

    def load(self, path: str, compute_units: Any, function_name: str) -> Any:
        assert isinstance(compute_units, ct.ComputeUnit)
        self.asked["load"] += 1
        if function_name == self.refuses:
            raise RuntimeError("Error in building plan")
        program = Program(Path((Path(path) / "package").read_text()), "float16")
        return SimpleNamespace(
            make_state=lambda: program.new_state(function_name),
            predict=lambda data, state=None: program.run(function_name, data, state or {}),
        )

    def plan(self, path: str, compute_units: Any) -> Any:
        assert isinstance(compute_units, ct.ComputeUnit)
        self.asked["plan"] += 1
        functions = read_manifest(Path(path).parents[2]).functions
        operations = [SimpleNamespace(operator_name=f"ios18.{k}") for k in OPERATIONS.elements()]
        constant = SimpleNamespace(operator_name="const")
        block = SimpleNamespace(block=SimpleNamespace(operations=[constant, *operations]))
        program = SimpleNamespace(functions={function.name: block for function in functions})
        return SimpleNamespace(
            model_structure=SimpleNamespace(program=program),
            get_compute_device_usage_for_mlprogram_operation=self.usage,
        )

    def usage(self, operation: Any) -> Any:
        kind = operation.operator_name.split(".")[-1]
        if kind == "const":
            return None
        name = "CPU" if kind in self.elsewhere else "NeuralEngine"
        return SimpleNamespace(preferred_compute_device=type(f"ML{name}ComputeDevice", (), {})())


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A converted model that may be changed."""
    return shutil.copytree(converted_folder("llama"), tmp_path / "model")


def executor(folder: Path) -> NativeExecutor:
    return NativeExecutor(folder, read_manifest(folder), "cpu_and_ne")


@pytest.mark.parametrize("options", [(), (("layers_per_part", 2),)])
def test_it_computes_what_the_reference_computes(
    devices: Devices, tmp_path: Path, options: tuple[Any, ...]
) -> None:
    """Every function of every part is loaded and reached, states and the past included."""
    folder = shutil.copytree(converted_folder("llama", options=options), tmp_path / "model")
    reference = converted_model(converted_folder("llama", options=options), "float16")
    model = ConvertedModel(folder, executor(folder))
    parts, functions = len(model.manifest.parts), len(model.manifest.functions)
    assert devices.asked == {"compile": parts, "load": parts * functions, "plan": parts}
    found = []
    for one in (model, reference):
        state = one.new_state()
        one.run("prefill", chain_feed(TOKENS[:3], 0, one.slots), state)
        tops = one.run("decode", chain_feed(TOKENS[3:4], 3, one.slots), state)
        tops += one.run("tree", chain_feed(TOKENS[4:], 4, one.slots), state)
        pieces = list(CoremlPrefill(one).pieces(TOKENS))
        found.append(([top.ids for top in tops], [top.logits for top in tops], pieces))
    for ours, theirs in zip(*found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_compiled_once_and_judged_once(devices: Devices, folder: Path) -> None:
    """The second start finds the compiled model and where its operations run."""
    first, second = executor(folder), executor(folder)
    assert (devices.asked["compile"], devices.asked["plan"]) == (1, 1)
    assert first.placements == second.placements
    assert first.compute_unit == second.compute_unit == "ane"
    assert set(first.load_ms) == {"tree", "decode", "prefill", "prefill_kv"}


def test_what_runs_elsewhere_is_not_called_ane(devices: Devices, folder: Path) -> None:
    """Products of weights on the CPU: the units that were asked for say nothing."""
    devices.elsewhere = ("conv",)
    made = executor(folder)
    assert made.compute_unit == "mixed"
    assert made.placements["tree"].off_ane == {"conv": OPERATIONS["conv"]}
    assert made.placements["tree"].devices == {"ane": 70, "cpu": 30}


def test_a_refused_function_is_named(devices: Devices, folder: Path) -> None:
    """And where the compiled model lies, which may be what is broken."""
    devices.refuses = "tree"
    with pytest.raises(ModelError, match=r"tree of '.*mlmodelc': Error in building plan"):
        executor(folder)


def test_two_that_compile_at_once_share_one(
    devices: Devices, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier and a drafter on one package: the later one takes what the other has made."""
    place: list[Path] = []

    def late(package: str, destination: str) -> str:
        made = native._cache(folder) / Path(destination).name
        made.mkdir()
        (made / "package").write_text(package)
        place.append(made)
        return devices.compile(package, destination)

    monkeypatch.setattr(native, "compile_model", late)
    executor(folder)
    kept = {file.name for file in place[0].parent.iterdir()}
    assert kept == {"model.mlmodelc", "placement-cpu_and_ne.json"}


def test_a_killed_compilations_scratch_goes(devices: Devices, folder: Path) -> None:
    """The watchdog leaves no time to clean up; one that still works is let be."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    cache = native._cache(folder)
    for process in (dead.pid, os.getppid()):
        (cache / f".model.{process}.x.tmp").mkdir(parents=True)
    executor(folder)
    scratch = {path.name for path in cache.glob(".*.tmp")}
    assert scratch == {f".model.{os.getppid()}.x.tmp"}
    assert devices.asked["compile"] == 1


@pytest.mark.parametrize(
    ("called", "arguments"),
    [
        (ct.models.CompiledMLModel.__init__, (None, "path", ct.ComputeUnit.CPU_AND_NE, "tree")),
        (ct.models.CompiledMLModel.predict, (None, {}, None)),
        (ct.models.CompiledMLModel.make_state, (None,)),
        (MLComputePlan.load_from_path, ("path", ct.ComputeUnit.CPU_AND_NE)),
        (MLComputePlan.get_compute_device_usage_for_mlprogram_operation, (None, None)),
        (compile_model, ("package", "destination")),
    ],
)
def test_coremltools_takes_what_it_is_given(
    called: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """What stands for it above takes no other arguments than the real one."""
    inspect.signature(called).bind(*arguments)
