"""Kernels for Metal, run on the host."""

import sys
from collections.abc import Iterator

import mlx.core as mx
import pytest

from services.kernels.metal.kernel import build
from services.kernels.register import kernels
from services.mlx import selftest
from tests.services.kernels.metal.host import HostMetal


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> HostMetal:
    """Compiles each kernel once."""
    return HostMetal(tmp_path_factory.mktemp("metal"))


@pytest.fixture
def host(compiled: HostMetal, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMetal]:
    """MLX runs kernels for Metal on the host."""
    if sys.platform == "darwin":
        pytest.skip("a Mac runs the kernels themselves, and compares them when a model is loaded")
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    monkeypatch.setattr(mx.fast, "metal_kernel", compiled.kernel)
    compiled.launches.clear()
    build.cache_clear()
    yield compiled
    build.cache_clear()
    mx.set_default_device(device)


@pytest.fixture
def mac(host: HostMetal, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMetal]:
    """This process takes itself for one on a Mac; nothing is timed, and kernels are as fast."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M4 Pro"})
    monkeypatch.setattr(selftest, "_time", lambda run: 1.0)
    kernels.cache_clear()
    yield host
    kernels.cache_clear()
