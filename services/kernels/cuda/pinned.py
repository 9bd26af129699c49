"""Host memory that the device reads and writes over the bus."""

import ctypes
import importlib
import platform
from typing import Any

import numpy as np
import numpy.typing as npt


def allocate(count: int) -> npt.NDArray[np.uint8]:
    """Allocate [count] bytes of zeros.

    They are never freed: a pass may use them until the process ends.

    Raises:
        OSError: such memory is not available here.
    """
    if platform.machine() not in {"x86_64", "AMD64"}:
        # Other processors may make stores visible out of program order.
        raise OSError("the processor is no x86-64")
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise OSError(str(error)) from error
    kind = runtime.cudaHostAllocPortable | runtime.cudaHostAllocMapped
    status, address = runtime.cudaHostAlloc(count, kind)
    if int(status):
        raise OSError(f"no pinned memory of {count} bytes: {status}")
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(int(address)))
    memory[:] = 0
    return memory


def address_of(memory: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the low and the high word of the address of its first byte."""
    address: int = memory.__array_interface__["data"][0]
    return address % 2**32, address >> 32
