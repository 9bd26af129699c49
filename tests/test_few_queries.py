"""The attention kernel for CUDA, its source run on the host: what MLX's attention gives.

A CUDA device is not needed: the kernel's file is compiled as C++, each of its threads is one
of the host's. What only a device can show (that MLX compiles and feeds it) is tried when a
model is loaded there (`_works`).
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.few_queries import _takes

_ROOT = Path(__file__).parent.parent
_DEADLINE_S = 120


@pytest.fixture(scope="module", params=[64, 128])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("kernel") / "few_queries"
    source = _ROOT / "tests" / "few_queries_host.cpp"
    compiler = shutil.which("c++")
    assert compiler is not None, "the tests need a C++ compiler, c++"
    flags = ["-std=c++20", "-O1", "-pthread", f"-DSIZE={request.param}"]
    include = f"-I{_ROOT / 'services'}"
    subprocess.run(
        [compiler, *flags, include, "-o", program, source], check=True, timeout=_DEADLINE_S
    )
    program.with_suffix(".size").write_text(str(request.param))
    return program


@pytest.mark.parametrize("keys", [5, 21])
@pytest.mark.parametrize("mask", ["none", "causal", "tree"])
def test_is_mlx_attention(kernel: Path, keys: int, mask: str) -> None:
    size, heads, kv_heads, queries = int(kernel.with_suffix(".size").read_text()), 4, 2, 3
    random = np.random.default_rng(keys)
    q = random.normal(size=(1, heads, queries, size)).astype(np.float32)
    k, v = random.normal(size=(2, 1, kv_heads, keys, size)).astype(np.float32)
    seen = random.random((queries, keys)) < 0.5
    seen[:, 0] = True
    expected = mx.fast.scaled_dot_product_attention(
        mx.array(q),
        mx.array(k),
        mx.array(v),
        scale=size**-0.5,
        mask={"none": None, "causal": "causal", "tree": mx.array(seen)}[mask],
    )
    kind = ["none", "causal", "tree"].index(mask)
    head = f"{heads} {kv_heads} {queries} {keys} {kind}\n"
    numbers = np.concatenate([a.ravel() for a in (q, k, v, seen.astype(np.float32))])
    told = subprocess.run(
        [kernel],
        input=head + "\n".join(map(str, numbers)),
        capture_output=True,
        text=True,
        check=True,
        timeout=_DEADLINE_S,
    )
    found = np.array(told.stdout.split(), np.float32).reshape(queries, heads, size)
    np.testing.assert_allclose(found.swapaxes(0, 1)[None], np.array(expected), atol=2e-5)


def _call(count: int, slots: int, **more: Any) -> bool:
    """Whether our kernel serves such a call."""
    dtype = more.get("dtype", mx.float16)
    queries = mx.zeros((more.get("batch", 1), 4, count, more.get("size", 64)), dtype)
    keys = mx.zeros((1, 2, slots, 64), more.get("kv", dtype))
    return _takes(queries, keys, more.get("mask", mx.zeros((count, slots), mx.bool_)))


def test_which_calls_it_serves() -> None:
    assert all([_call(2, 256), _call(5, 1024), _call(32, 256), _call(5, 256, mask="causal")])
    assert not any(
        [
            _call(1, 256),  # MLX has a kernel for one
            _call(33, 256),  # reads the keys too often
            _call(5, 256, batch=2),
            _call(5, 256, size=80),
            _call(5, 256, dtype=mx.float32),
            _call(5, 256, kv=mx.float32),
            _call(5, 256, mask=mx.zeros((5, 255), mx.bool_)),
            _call(5, 256, mask=mx.zeros((5, 256), mx.float16)),
        ]
    )
