"""How much of the memory's bandwidth plain decoding uses is said wherever both are known."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from launch.bench.bandwidth import describe_ceiling, describe_share, read_weight_bytes
from launch.models import weights
from launch.models.weights import Weights, weights_of
from services.tools.hardware import survey
from tests.support.tiny_models import write_tiny_model


def test_the_ceiling_is_what_the_memory_allows() -> None:
    """Reading speed over the weights of a pass."""
    assert describe_ceiling(500_000_000, 10e9) == (
        "10.0 GB/s read; 0.50 GB of weights per token allow plain decoding 20.0 tok/s at most"
    )


def test_the_share_is_what_is_used_of_it() -> None:
    """Tokens a second times the weights, over the reading speed."""
    text = describe_share(15.0, 500_000_000, 10e9)
    assert "15.0 tok/s are 7.5 GB/s, 0.75 of the 10.0 GB/s" in text


def test_no_share_is_more_than_the_whole() -> None:
    """A reading speed that decoding exceeds was measured on a busy machine, and is said to be."""
    text = describe_share(25.0, 500_000_000, 10e9)
    assert "25.0 tok/s are 12.5 GB/s" in text
    assert "1.25 of" not in text
    assert "busy" in text


@pytest.mark.parametrize(("tok_s", "weights", "reads"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_is_said_of_what_is_not_known(tok_s: float, weights: int, reads: float) -> None:
    """A device that was not measured, a model that cannot be read, an answer without speed."""
    assert describe_share(tok_s, weights, reads) == ""
    if not weights or not reads:
        assert describe_ceiling(weights, reads) == ""


def test_weights_count_as_the_device_holds_them(tmp_path: Path) -> None:
    """A folder without a model counts nothing."""
    folder = write_tiny_model(tmp_path / "tiny", "llama", seed=1)
    on_cpu, elsewhere = (read_weight_bytes(str(folder), device) for device in ("cpu", "metal"))
    assert on_cpu > 0
    assert elsewhere > 0
    assert read_weight_bytes(str(tmp_path / "none"), "cpu") == 0


def test_a_pass_reads_less_than_is_stored() -> None:
    """Not an embedding beside a head; on a CPU, wide scales as the kernels hold them."""
    sizes = {"bytes_as_stored": 100, "bytes_per_pass": 80, "wide_scale_bytes": 32}
    packed = Weights(
        10, **sizes, products=10, kv_elements=1, context_length=1, architecture="llama"
    )
    assert packed.bytes_on("cpu") == 100
    assert packed.bytes_per_pass_on("metal") == 80
    assert packed.bytes_per_pass_on("cpu") == 58
    assert packed._replace(architecture="mamba").bytes_per_pass_on("cpu") == 40


def test_a_large_drafter_reads_four_bits_on_a_cpu() -> None:
    """And their scales; never more than is stored, and others as they are."""
    sizes = {"bytes_as_stored": 10**9, "bytes_per_pass": 10**9, "wide_scale_bytes": 0}
    large = Weights(
        10**9, **sizes, products=4 * 10**8, kv_elements=1, context_length=1, architecture="qwen2"
    )
    assert large.bytes_per_draft_on("cpu") == 25 * 10**7
    assert large.bytes_per_draft_on("metal") == 10**9
    assert large._replace(products=10**8).bytes_per_draft_on("cpu") == 10**9
    assert large._replace(bytes_per_pass=10**8).bytes_per_draft_on("cpu") == 10**8
    assert large._replace(architecture="mamba").bytes_per_draft_on("cpu") == 4 * 10**9


@pytest.mark.processes
def test_the_machine_is_measured() -> None:
    """A positive number of bytes a second, from the very kernels that decode."""
    assert survey().read_bytes_s > 1e6


def test_a_pass_reads_the_rows_that_a_trimmed_head_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter's embedding gives one row a token, and its head has those of `draft_head.json`, or
    where these are many the first of them.
    """
    config = {"model_type": "qwen2", "num_attention_heads": 2, "hidden_size": 8}
    config |= {"num_hidden_layers": 1, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = {
        name: mx.zeros((100, 8), mx.float16)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    assert weights_of(tmp_path)[1:3] == (3200, 1600)
    (tmp_path / "draft_head.json").write_text(json.dumps([1, 2, 3]))
    assert weights_of(tmp_path)[1:3] == (3200, 48)
    monkeypatch.setattr(weights, "FREQUENT_TOKENS", 2)
    assert weights_of(tmp_path)[1:3] == (3200, 32)
