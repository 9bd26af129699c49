"""Which kernels a model uses on Metal, as if this were a Mac: they are tried, then used."""

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from protocol.jobs.kernel_report import KernelReportSettings
from services.engine.packing import enable_packing
from services.kernels.metal import attention, choice, probe, product
from services.kernels.metal.choice import FewRowsEmbedding, FewRowsLinear, use_kernels
from services.kernels.metal.probe import choose_rows
from services.kv.cache import KVStore
from services.mlx.loader import compute_unit, windows_of
from services.runtime.preparation import run_all
from services.tools import kernel_report
from tests.services.kernels.metal.host import HostMetal
from tests.support.tiny_models import write_tiny_model

_TOKENS = [3, 1, 4, 1, 5]
_SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 1,
}  # fmt: skip
"""The smallest model whose products and attention the kernels take."""


@pytest.fixture
def model() -> Any:
    """A model in 4 bits, with a bias here and there."""
    made: Any = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            vocab_size=64,
            rms_norm_eps=1e-5,
            attention_bias=True,
            tie_word_embeddings=True,
            **_SHAPE,
        )
    )
    mx.random.seed(3)
    made.apply(lambda array: mx.random.normal(array.shape) * 0.2)
    made.set_dtype(mx.float16)
    nn.quantize(made, group_size=64, bits=4)
    enable_packing(made)
    return made


def _logits(model: Any, counts: list[int]) -> mx.array:
    """[tokens, vocabulary] of a text in passes of so many tokens."""
    store, rows, at = KVStore(windows_of(model), bucketed=False), [], 0
    for count in counts:
        store.append(count)
        rows.append(model(mx.array([_TOKENS[at : at + count]]), cache=store.caches)[0])
        at += count
    return mx.concatenate(rows)


def _our_layers(model: Any) -> int:
    return sum(isinstance(m, FewRowsLinear | FewRowsEmbedding) for _, m in model.named_modules())


def _mute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention stays MLX's, for tests of products alone."""
    monkeypatch.setattr(attention, "SIZES", ())


def test_a_verification_has_the_bits_of_plain_decoding(mac: HostMetal, model: Any) -> None:
    """Five rows at once and one by one, through every product and attention of a model."""
    by_mlx = _logits(model, [5])
    used = run_all(use_kernels(model, "on"))
    tried = len(mac.launches)
    assert _our_layers(model) == 8
    together = _logits(model, [5])
    names = {name.split("_")[0] for name in mac.launches[tried:]}
    assert names == {"product", "attention"}
    assert mx.array_equal(together, _logits(model, [1] * 5)).item()
    assert mx.array_equal(together, _logits(model, [3, 2])).item()
    distance = mx.linalg.norm((together - by_mlx).astype(mx.float32))
    assert distance.item() < 0.01 * mx.linalg.norm(by_mlx.astype(mx.float32)).item()
    probes = used.report().probes
    assert {probe.kernel for probe in probes} == {"product", "attention"}
    assert all(probe.least_rows == 1 for probe in probes)
    assert sum(probe.layers for probe in probes) == 8


def test_the_kernels_can_be_left_again(
    mac: HostMetal, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is as it was, and what is chosen later takes the place of what was chosen before."""
    _mute(monkeypatch)
    before = _logits(model, [5])
    names = dict(nn.utils.tree_flatten(model.parameters())).keys()
    run_all(use_kernels(model, "on"))
    assert dict(nn.utils.tree_flatten(model.parameters())).keys() == names
    used = run_all(use_kernels(model, "off"))
    launched = len(mac.launches)
    assert mx.array_equal(_logits(model, [5]), before).item()
    assert not _our_layers(model)
    assert len(mac.launches) == launched
    assert not used.report().probes


def test_many_rows_go_to_mlx(mac: HostMetal, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _mute(monkeypatch)
    run_all(use_kernels(model, "on"))
    launched = len(mac.launches)
    model(mx.ones((1, 17), mx.int32))
    assert len(mac.launches) == launched


@pytest.mark.parametrize(
    ("own", "least", "reason"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.1}, 1, ""),
        ({1: 1.3, 2: 1.2, 4: 1.2, 8: 1.3}, 2, "fewer are faster by MLX"),
        ({1: 1.3, 2: 1.3, 4: 1.3, 8: 1.3}, 4, "fewer are faster by MLX"),
        ({1: 1.0, 2: 1.2, 4: 1.5, 8: 2.7}, 0, "it is not faster than MLX's"),
        ({1: 0.5, 2: 1.5, 4: 2.0, 8: 2.7}, 0, "it is not faster than MLX's"),
    ],
)
def test_used_where_it_is_faster(own: dict[int, float], least: int, reason: str) -> None:
    """From the fewest rows that are not slower, if from there on it is faster on average."""
    assert choose_rows(own, {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.7}) == (least, reason)


def test_a_single_row_can_stay_mlx_own(
    mac: HostMetal, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mute(monkeypatch)
    monkeypatch.setattr(probe, "choose_rows", lambda own, mlx: (2, "slow"))
    run_all(use_kernels(model, "auto"))
    launched = len(mac.launches)
    _logits(model, [1, 1])
    assert len(mac.launches) == launched
    _logits(model, [2])
    assert len(mac.launches) > launched


def test_slower_kernels_are_not_used(
    mac: HostMetal, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As fast is not faster; what is asked for by a setting is used all the same."""
    _mute(monkeypatch)
    with caplog.at_level(logging.INFO):
        used = run_all(use_kernels(model, "auto"))
    said = "not used: it is not faster than MLX's; share of MLX's time by rows: 1: 1.00, 2: 1.00, "
    assert said in caplog.text
    assert not _our_layers(model)
    assert [probe.least_rows for probe in used.report().probes] == [0] * 2
    run_all(use_kernels(model, "on"))
    assert _our_layers(model) == 8


@pytest.mark.parametrize("broken", ["wrong", "uneven", "no build"])
def test_what_is_wrong_or_does_not_run_is_not_used(
    broken: str,
    mac: HostMetal,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so in a sentence, and the model computes by MLX."""

    def multiply(x: mx.array, weights: product.Quantised) -> mx.array:
        if broken == "no build":
            raise RuntimeError("[metal_kernel] unable to build")
        right = probe._by_mlx(x, weights)
        return right * 1.1 if broken == "wrong" else right * (1 + 0.001 * (x.shape[0] % 2))

    _mute(monkeypatch)
    monkeypatch.setattr(product, "multiply", multiply)
    with caplog.at_level(logging.WARNING):
        run_all(use_kernels(model, "on"))
    assert not _our_layers(model)
    said = {
        "wrong": "0.1 from the usual result",
        "uneven": "bits of fewer rows: ",
        "no build": "not used: [metal_kernel] unable to build",
    }[broken]
    assert said in caplog.text
    assert len(caplog.records) == 2  # shapes


def test_attention_that_is_wrong_is_not_used(
    mac: HostMetal, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *call: 1.1 * right(*call))
    used = run_all(use_kernels(model, "on"))
    _logits(model, [3, 2])
    assert [probe.least_rows for probe in used.attention.values()] == [0]
    assert "Metal attention" in caplog.text


def test_gpus_with_accelerators_are_left_to_mlx(
    mac: HostMetal, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the M5 on, unless a setting asks for the kernels."""
    _mute(monkeypatch)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M5 Max"})
    note = run_all(use_kernels(model, "auto")).report().note
    assert not mac.launches
    assert "Apple M5 Max" in note
    assert "metal_kernels=on" in note
    run_all(use_kernels(model, "on"))
    assert _our_layers(model) == 8


def test_nothing_changes_where_there_is_no_metal(model: Any) -> None:
    if mx.metal.is_available():
        pytest.skip("there is")
    run_all(use_kernels(model, "on"))
    assert not _our_layers(model)
    q, k = mx.zeros((1, 2, 3, 64), mx.float16), mx.zeros((1, 1, 9, 64), mx.float16)
    assert choice.attend(q, k, k, 1.0, "causal") is None


def test_the_report_says_that_there_is_no_gpu() -> None:
    if compute_unit() != "cpu":
        pytest.skip("there is one")
    found = kernel_report.measure(KernelReportSettings(model="nowhere"))
    assert found.note == "there is no GPU here"
    assert not found.probes


def test_what_the_reports_measure(mac: HostMetal, tmp_path: Path) -> None:
    """Each shape of a folder's layers, and for `ssd mac-check` passes without and with kernels."""
    config = {**_SHAPE, "quantization": {"group_size": 64, "bits": 4}, "torch_dtype": "float16"}
    folder = write_tiny_model(tmp_path / "model", "quantized", layers=1, config=config)
    told = KernelReportSettings(model=str(folder), kernels="on")
    found = kernel_report.measure(told)
    assert not found.pass_ms
    both = kernel_report.measure(KernelReportSettings(model=str(folder), passes=True))
    assert [one.shape for one in both.probes] == [one.shape for one in found.probes]
    assert [one.own_ms.keys() for one in found.probes] == [
        dict.fromkeys(probe.TIMED_ROWS).keys()
    ] * len(found.probes)
    assert list(both.pass_ms) == list(both.pass_with_kernels_ms) == list(range(1, 17))
