"""A drafter's weights in few bits: close to its floats, and only where they are asked for."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from protocol.settings import DraftWeights
from services.drafter.backends import draft_weights
from services.drafter.backends.draft_weights import quantise_linears, use_weights
from services.kernels.register import KERNELS
from services.mlx.lm_head import keep_rows


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(600, 256)
        self.layer = nn.Linear(256, 512, bias=False)
        self.small = nn.Linear(16, 16)


class _Tied(nn.Module):
    """What is multiplied of a model with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Inner()


def outputs(model: _Tied, rows: int) -> list[mx.array]:
    """Of the layer, the head and the small layer."""
    x = mx.random.normal((rows, 256), key=mx.random.key(rows))
    inner = model.model
    found = [inner.layer(x), inner.embed_tokens.as_linear(x), inner.small(x[:, :16])]
    mx.eval(found)
    return found


def test_floats_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are asked for, and on a GPU unless bytes are."""
    model = _Tied()
    before = outputs(model, 4)
    use_weights(model, "float")
    monkeypatch.setattr(draft_weights, "kernels", lambda: KERNELS["metal"])
    use_weights(model, "auto")
    for old, new in zip(before, outputs(model, 4), strict=True):
        assert mx.array_equal(old, new)


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4)])
def test_on_a_gpu_linear_layers_are_quantised(
    monkeypatch: pytest.MonkeyPatch, weights: DraftWeights, bits: int
) -> None:
    """By MLX's own quantisation, where their size allows it."""
    monkeypatch.setattr(draft_weights, "kernels", lambda: KERNELS["metal"])
    model = _Tied()
    before = outputs(model, 4)
    use_weights(model, weights)
    assert isinstance(model.model.layer, nn.QuantizedLinear)
    assert model.model.layer.bits == bits
    assert type(model.model.small) is nn.Linear
    after = outputs(model, 4)
    assert (
        0.0
        < mx.abs(before[0] - after[0]).max().item()
        < 6 / 2**bits * mx.abs(before[0]).max().item()
    )


@pytest.mark.parametrize(("many", "bits"), [(0, 4), (10**9, 8)])
def test_large_drafters_have_four_bits_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, many: int, bits: int
) -> None:
    """By the number of weights; whatever they are in the file."""
    asked: list[int] = []
    monkeypatch.setattr(draft_weights, "kernels", lambda: KERNELS["cpu"])
    monkeypatch.setattr(draft_weights, "MANY_DRAFT_WEIGHTS", many)
    monkeypatch.setattr(
        draft_weights, "equip", lambda _, *, rounds, bits: asked.append(bits) or rounds
    )
    for stored in (0, 8, 4):
        model = _Tied()
        if stored:
            quantise_linears(model, stored)
        model.model.small = nn.Identity()
        use_weights(model, "auto")
    assert asked == [bits, bits, 8]


def test_models_that_the_kernels_do_not_know_draft_with_floats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning only for those who asked for bytes."""
    monkeypatch.setattr(draft_weights, "kernels", lambda: KERNELS["cpu"])
    use_weights(_Tied(), "auto")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    use_weights(_Tied(), "int8")
    assert "only our CPU kernels read bytes" in caplog.text


def test_quantising_leaves_other_layers() -> None:
    """Embeddings look tokens up, and are no product."""
    model = _Tied()
    quantise_linears(model, 8)
    assert type(model.model.embed_tokens) is nn.Embedding


@pytest.mark.parametrize("stored", [0, 4])
def test_on_cuda_a_drafter_computes_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    """Whatever its file has, so that kernels of ours serve it; its outputs stay close."""
    monkeypatch.setattr(draft_weights, "kernels", lambda: KERNELS["cuda"])
    model = _Tied()
    if stored:
        nn.quantize(
            model,
            group_size=64,
            bits=stored,
            class_predicate=lambda _, m: hasattr(m, "weight") and m.weight.shape[-1] % 64 == 0,
        )
        for name in ("scales", "biases"):
            model.model.layer[name] = model.model.layer[name].astype(mx.float16)
    before = outputs(model, 4)
    use_weights(model, "auto")
    inner = model.model
    kinds = (type(inner.layer), type(inner.embed_tokens), type(inner.small))
    assert kinds == (nn.Linear, nn.Embedding, nn.Linear)
    assert all(one.weight.dtype == mx.bfloat16 for one in (inner.layer, inner.embed_tokens))
    assert inner.small.bias.dtype == mx.bfloat16
    for old, new in zip(before, outputs(model, 4), strict=True):
        assert mx.allclose(old, new, atol=0.02 * float(mx.abs(old).max()), rtol=0.0)


def test_a_large_drafter_keeps_its_weights_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reading would cost more than its launches."""
    monkeypatch.setattr(draft_weights, "kernels", lambda: KERNELS["cuda"])
    model = _Tied()
    quantise_linears(model, 8)
    stored = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    for most, kind in ((stored - 1, nn.QuantizedLinear), (stored, nn.Linear)):
        monkeypatch.setattr(draft_weights, "_MOST_BYTES", most)
        use_weights(model, "auto")
        assert type(model.model.layer) is kind


def test_a_trimmed_head_leaves_nothing_wider_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embedding, out of the model's sight, may be stored in another type."""
    monkeypatch.setattr(draft_weights, "kernels", lambda: KERNELS["cuda"])
    model: Any = _Tied()
    nn.quantize(model, class_predicate=lambda _, layer: isinstance(layer, nn.Embedding))
    keep_rows(model, np.arange(0, 600, 3))
    use_weights(model, "auto")
    embedding = model.model.embed_tokens
    x = embedding(mx.array([[5, 6]]))
    assert x.dtype == embedding.as_linear(x).dtype == mx.bfloat16
