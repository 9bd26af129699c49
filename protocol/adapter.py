"""LoRA adapters of a target, in the format of `mlx_lm.lora`."""

import hashlib
from pathlib import Path

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
"""Files in an adapter's folder."""


def identify_adapter(folder: str) -> str:
    """Return a string that identifies an adapter and changes whenever it is trained.

    Args:
        folder: folder of the adapter; empty gives "".

    Raises:
        OSError: its files cannot be read.
    """
    if not folder:
        return ""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        digest.update((Path(folder) / name).read_bytes())
    return f"adapter {digest.hexdigest()[:16]}"
