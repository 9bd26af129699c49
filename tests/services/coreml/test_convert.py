"""Conversion: what is read, what is written, what is refused, and what an end leaves behind."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from coremltools._deps.kmeans1d import cluster

from launch.commands import convert
from launch.models.coreml_models import default_conversion_dir, find_converted, require_converted
from launch.stack.child import Lifeline
from launch.workers.worker import JsonWorker
from protocol.errors import ModelError, UsageError
from protocol.jobs.convert import ROUTES, Compression, ConvertEvent
from services.coreml.architecture import read_architecture
from services.coreml.convert import source as source_module
from services.coreml.convert.compression import _centres, pack
from services.coreml.convert.source import Source
from services.coreml.convert.weights import ModelTensors, fingerprint_of
from services.coreml.functions import parts_of
from services.coreml.manifest import read_manifest
from services.coreml.runtime import ops
from services.coreml.runtime.blob import to_float16
from services.coreml.runtime.placement import Placement, joint_unit, placement_of
from services.coreml.runtime.program import Program
from services.mlx.loader import load
from tests.support.converted import converted_folder, settings_for, source_folder
from tests.support.stack import eventually
from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).parents[3]


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


# ---------------------------------------------------------------- weights


def test_quantised_weights_are_read_as_mlx_reads_them() -> None:
    """Affine groups are dequantised to what mlx-lm computes with."""
    folder = source_folder("quantized")
    ours = ModelTensors(folder).matrix("model.layers.1.mlp.up_proj")
    theirs = np.array(load(folder).module.layers[1].mlp.up_proj.weight)
    np.testing.assert_allclose(theirs, ours, atol=1e-6)


def test_bfloat16_is_read(tmp_path: Path) -> None:
    """numpy has no bfloat16: it becomes float32, exactly."""
    values = mx.array(rng().normal(size=(3, 5)).astype(np.float32)).astype(mx.bfloat16)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a.weight": values})
    (tmp_path / "config.json").write_text("{}")
    np.testing.assert_array_equal(
        np.array(values.astype(mx.float32)), ModelTensors(tmp_path).matrix("a")
    )


def test_the_fingerprint_is_of_weights_and_head(tmp_path: Path) -> None:
    """Another tensor or another trimmed head is another source."""
    plain = fingerprint_of(write_tiny_model(tmp_path / "a", "llama"))
    assert plain == fingerprint_of(write_tiny_model(tmp_path / "b", "llama"))
    assert plain != fingerprint_of(write_tiny_model(tmp_path / "c", "llama", seed=1))
    (tmp_path / "b" / "draft_head.json").write_text("[1, 2]")
    assert plain != fingerprint_of(tmp_path / "b")


def test_of_a_wide_head_the_first_tokens_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    (folder / "draft_head.json").write_text("[7, 3, 9]")
    monkeypatch.setattr(source_module, "FREQUENT_TOKENS", 2)
    source = Source(folder, "none")
    assert (source.head_size, source.head().dense().shape[0]) == (2, 2)
    assert source.head_ids is not None
    assert source.head_ids.tolist() == [7, 3]


@pytest.mark.parametrize("family", ["gemma2", "sliding", "moe", "dynamic", "mamba"])
def test_other_models_are_refused(family: str, tmp_path: Path) -> None:
    """What the builder cannot say is an error with a reason, never a wrong package."""
    folder = write_tiny_model(tmp_path / family, family)
    with pytest.raises(ModelError, match=r"cannot be converted|can be converted"):
        read_architecture(folder)


# ---------------------------------------------------------------- compression


@pytest.mark.parametrize(
    ("compression", "error"),
    [("none", 5e-4), ("int8", 0.012), ("palette8", 0.01), ("palette6", 0.04), ("palette4", 0.15)],
)
def test_compressed_matrices_stay_near(compression: Compression, error: float) -> None:
    """Relative error by kind; rows of very different size lose no more than others."""
    matrix = rng().normal(size=(32, 96)).astype(np.float32) * np.logspace(-1, 0, 32)[:, None]
    dense = pack(matrix.astype(np.float32), compression).dense()
    errors = np.linalg.norm(dense - matrix, axis=1) / np.linalg.norm(matrix, axis=1)
    assert errors.max() < error
    assert errors.mean() > 0.1 * error


@pytest.mark.parametrize("compression", [kind for kind in get_args(Compression) if kind != "none"])
def test_the_package_decodes_to_the_packed_weights(compression: Compression) -> None:
    """What the saved file holds, decompressed as CoreML would, is the matrix that was packed."""
    folder = converted_folder("llama", layers=1, options=(("compression", compression),))
    source = Source(source_folder("llama", layers=1), compression)
    packed = source.weight("model.layers.0.mlp.gate_proj")
    program = Program(folder / "model.mlpackage")
    constants = program._compile("tree").constants
    found = constants["l0_gate_weight"][:, :, 0, 0]
    scales = packed.scales if packed.palettes.size else None
    if scales is not None:  # palettes leave the scale to an operation
        found = found * scales.astype(np.float32)[:, None]
    np.testing.assert_allclose(found, packed.dense(), rtol=2e-3, atol=1e-6)


def test_functions_share_their_weights() -> None:
    """Four functions in one package take hardly more space than the weights once."""
    folder = converted_folder("llama")
    stored = sum(f.stat().st_size for f in (folder / "model.mlpackage").rglob("weight.bin"))
    matrices = sum(a.size for a in _arrays(source_folder("llama"))) * 2
    assert stored < 1.3 * matrices


def _arrays(folder: Path) -> list[mx.array]:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    return list(loaded.values())


def test_palettes_are_near_the_best_possible() -> None:
    """The squared error beside that of the exact algorithm, which is too slow to convert with."""
    points = np.unique(rng().normal(size=3000).astype(np.float16)).astype(np.float64)
    mass = np.abs(rng().normal(size=len(points))) + 0.1
    for count, excess in ((16, 1.05), (64, 1.15)):
        best = np.sort(cluster(points, count, weights=mass).centroids)
        found = _centres(points, mass, count)
        errors = [
            (mass * np.abs(points[:, None] - centres).min(axis=1) ** 2).sum()
            for centres in (found, best)
        ]
        assert len(found) == count
        assert errors[1] <= errors[0] < excess * errors[1]


# ---------------------------------------------------------------- the runtime's honesty


def test_rounding_is_that_of_float16() -> None:
    """Every number of float16, every tie between two, their neighbours, and what is not finite."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.unique(halves[np.isfinite(halves)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    neighbours = [np.nextafter(ties, np.float32(limit)) for limit in (-np.inf, np.inf)]
    usual = np.concatenate([finite[1:-1], ties[1:-1], *[b[1:-1] for b in neighbours]])
    for numbers in (usual, np.append(halves, np.float32([65519, 65520, 1e30, -1e30]))):
        with np.errstate(all="ignore"):
            expected = numbers.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(to_float16(numbers), expected)


def test_topk_takes_the_first_of_equals() -> None:
    """Falling values; among equal ones, the zeros of both signs included, the lower index."""
    x = rng().integers(-3, 4, size=(2, 50, 3)).astype(np.float32)
    x[x == 0] *= rng().choice(np.float32([-1, 1]), size=int((x == 0).sum()))
    values, indices = ops.OPS["topk"](ops.OpInputs({"x": x, "k": 20, "axis": 1}))
    order = np.argsort(-x, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def test_unknown_operations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime executes what it knows and says what it does not."""
    known = {name: op for name, op in ops.OPS.items() if name != "silu"}
    monkeypatch.setattr("services.coreml.runtime.program.OPS", known)
    program = Program(converted_folder("llama") / "model.mlpackage")
    with pytest.raises(ModelError, match="does not know the operation 'silu'"):
        program.new_state("tree")


def test_a_broken_package_is_refused(tmp_path: Path) -> None:
    """A folder without a package's manifest is named."""
    with pytest.raises(ModelError, match="is not a CoreML package"):
        Program(tmp_path)


def test_everything_is_float16_and_of_small_rank() -> None:
    """No float32 and no rank above 4, which the Neural Engine does not take."""
    program = Program(converted_folder("qwen2") / "model.mlpackage")
    for function in ("tree", "decode", "prefill", "prefill_kv"):
        for op in program._compile(function).ops:
            for name, kind, shape in op.outputs:
                assert len(shape) <= 4, name
                assert kind != 11, f"{name} is float32"  # MIL's DataType.FLOAT32


def test_only_the_truth_is_called_ane() -> None:
    """A model is "on the ANE" if its products are, whatever units were asked for."""
    on = [("ios18.conv", "ane")] * 40 + [("ios18.topk", "cpu")]
    off = [*on, ("ios18.conv", "cpu")]
    half = [("ios18.conv", "ane"), ("ios18.add", "cpu")] * 10
    assert placement_of(on).unit == "ane"
    assert placement_of(off).unit == "mixed"
    assert placement_of(off).off_ane == {"topk": 1, "conv": 1}
    assert placement_of(half).unit == "mixed"
    assert placement_of([("ios18.conv", "cpu")] * 3).unit == "cpu"
    assert placement_of([]).unit == "unknown"
    assert joint_unit([Placement({"ane": 9}, {}), Placement({"cpu": 9}, {"conv": 9})]) == "mixed"


def test_a_call_that_hangs_ends_the_process() -> None:
    """The kernel's alarm needs no thread of ours; a call in time leaves no alarm behind."""
    program = (
        "import threading, sys; from services.coreml.runtime.watchdog import within\n"
        "with within(300): pass\n"
        "print('in time', flush=True)\n"
        "with within(0.2): threading.Event().wait(300)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    assert done.stdout == b"in time\n"
    assert done.returncode == -signal.SIGALRM


# ---------------------------------------------------------------- the verb


def run_verb(*arguments: object) -> "subprocess.CompletedProcess[str]":
    shapes = (
        "--set",
        "context=128",
        "--set",
        "branches=8",
        "--set",
        "chunk=16",
        "--set",
        "tokens=12",
    )
    command = [sys.executable, "-m", "launch.cli", "convert", *map(str, arguments + shapes)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.processes
def test_the_verb_converts_compares_and_records(tmp_path: Path) -> None:
    """Figures on stdout as JSON, the same in the manifest, a folder that is complete."""
    out = tmp_path / "made"
    done = run_verb(
        "--model", source_folder("llama"), "--target", source_folder("qwen3"), "--out", out,
        "--set", "all_routes=true", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["passed"]
    assert figures["routes"]["tree"] == figures["agreement"]
    assert set(figures["routes"]) == set(ROUTES)
    for route in figures["routes"].values():
        assert route["tokens"] == figures["agreement"]["tokens"]
        assert route["greedy"] >= 0.95
        assert len(route["differences"]) == round((1 - route["greedy_with_ties"]) * route["tokens"])
    assert figures["agreement"]["greedy"] >= 0.95
    assert figures["compute_unit"] == "reference"
    assert abs(figures["draft"]["sampled"] - figures["model"]["sampled"]) < 0.01
    manifest = read_manifest(out)
    assert manifest.parity["agreement"] == figures["agreement"]
    assert manifest.source_fingerprint == fingerprint_of(source_folder("llama"))
    assert list(tmp_path.iterdir()) == [out]


def test_another_models_conversion_is_not_replaced(tmp_path: Path) -> None:
    """Without --force; nothing is converted before that is known."""
    place = tmp_path / "made"
    place.mkdir()
    (place / "coreml.json").write_text(json.dumps({"source": "/models/another"}))
    with pytest.raises(UsageError, match=r"'/models/another'.*--force"):
        convert._require_own(place, source_folder("llama"))
    (place / "coreml.json").write_text(json.dumps({"source": str(source_folder("llama"))}))
    convert._require_own(place, source_folder("llama"))
    convert._require_own(tmp_path / "new", source_folder("llama"))


@pytest.mark.processes
def test_below_the_threshold_nothing_is_written(tmp_path: Path) -> None:
    """Exit code 6, and what a former conversion wrote stays."""
    out = tmp_path / "made"
    done = run_verb(
        "--model", source_folder("llama"), "--out", out, "--set", "compression=palette4",
        "--set", "threshold=1.0",
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    assert "below threshold 1" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    """Ended while it works: neither the folder nor the half of one."""
    out = tmp_path / "made"
    settings = settings_for(source_folder("llama"), out)
    values = {field: getattr(settings, field) for field in settings.__struct_fields__}

    def is_interrupted() -> bool:
        with contextlib.closing(Lifeline()) as lifeline:
            told = type(settings)(**{**values, "lifeline": lifeline.child_end})
            with JsonWorker("conversion", "services.coreml", told) as process:
                assert next(process.events(ConvertEvent))
                is_half_there = bool(list(tmp_path.glob(".made.*.tmp")))
        if out.exists():  # it was done before it was ended
            shutil.rmtree(out)
            is_half_there = False
        assert list(tmp_path.iterdir()) == []
        return is_half_there

    eventually(is_interrupted, "a conversion is ended while it works")


def test_where_converted_models_are_found(tmp_path: Path) -> None:
    """The folder itself, or the one next to it; else the error says what to run."""
    plain = tmp_path / "model"
    plain.mkdir()
    with pytest.raises(ModelError, match="ssd convert --model"):
        require_converted(plain)
    default_conversion_dir(plain).mkdir()
    assert find_converted(plain) is None
    (default_conversion_dir(plain) / "coreml.json").write_text("{}")
    assert find_converted(plain) == default_conversion_dir(plain)
    assert find_converted(default_conversion_dir(plain)) == default_conversion_dir(plain)


def test_large_models_are_cut_into_parts() -> None:
    """Every layer is in one part."""
    parts = parts_of(7, 3)
    assert [(part.first, part.stop) for part in parts] == [(0, 3), (3, 6), (6, 7)]
    assert [part.layers for part in parts_of(7, 0)] == [7]
