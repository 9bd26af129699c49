"""Kernels for CUDA on the host: compiled as C++ and run, or with numpy in their place."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from services.kernels.cpu.library import view
from services.kernels.cuda.kv_rows import KVBuffers

_FOLDER = Path(__file__).parent
_KERNELS = Path(__file__).parents[4] / "services" / "kernels" / "cuda"
_DEADLINE_S = 120


def compile_kernel(source: str, program: Path, **constants: int) -> Path:
    """The program of a C++ file beside this one, with these constants."""
    compiler = shutil.which("c++")
    assert compiler is not None, "the tests need a C++ compiler, c++"
    flags = [
        "-std=c++20",
        "-O1",
        "-pthread",
        f"-I{_KERNELS}",
        *(f"-D{name}={value}" for name, value in constants.items()),
    ]
    command = [compiler, *flags, "-o", program, _FOLDER / source]
    subprocess.run(command, check=True, timeout=_DEADLINE_S)
    return program


def run_kernel(program: Path, *inputs: Any) -> npt.NDArray[np.float32]:
    """The numbers that it prints, given these numbers and arrays."""
    numbers = np.concatenate([np.asarray(one, np.float64).ravel() for one in inputs])
    told = subprocess.run(
        [program],
        input="\n".join(f"{number:.9g}" for number in numbers),
        capture_output=True,
        text=True,
        check=True,
        timeout=_DEADLINE_S,
    )
    return np.array(told.stdout.split(), np.float32)


def write_rows(into: KVBuffers, keys: mx.array, values: mx.array) -> mx.array:
    """Stands in for `kv_rows.write`, by numpy and at once."""
    mx.eval(into, keys, values)
    for buffer, rows in ((into.keys, keys), (into.values, values)):
        view(buffer)[0, :, into.slots.tolist()] = np.array(rows[0]).swapaxes(0, 1)
    return mx.zeros(1)


def move_rows(keys: mx.array, values: mx.array, slots: mx.array, to: int) -> mx.array:
    """Stands in for `kv_rows.move`."""
    mx.eval(keys, values, slots)
    for buffer in (keys, values):
        held = view(buffer)
        held[..., to : to + slots.size, :] = held[..., slots.tolist(), :]
    return mx.zeros(1)


def halve_words(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Words of 32 bits as halves, which a float holds exactly: the lower one first."""
    return np.stack([words & 0xFFFF, words >> 16], axis=-1)


def attend_gathered(  # noqa: PLR0917  # `Attend`
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    first: mx.array,
    scale: float,
) -> mx.array:
    """Compute `Attend` with MLX's own operations, which copy the visible slots; for comparison."""
    slots = first[:, None] + mx.arange(mask.shape[1])[None]
    gathered = [mx.take(buffer, slots, axis=1).swapaxes(0, 1) for buffer in (keys, values)]
    rows = queries.squeeze(0).swapaxes(0, 1)[:, :, None]
    out: mx.array = mx.fast.scaled_dot_product_attention(
        rows, gathered[0], gathered[1], scale=scale, mask=mask[:, None, None]
    )
    return out[:, :, 0].swapaxes(0, 1)[None]
