"""LoRA adapters of a target, as `mlx_lm.lora` writes them."""

import hashlib
from pathlib import Path

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
"""What the folder of an adapter holds."""


def identify_adapter(folder: str) -> str:
    """What tells an adapter from others, and from itself before it was trained on.

    Args:
        folder: of the adapter; empty gives "".

    Raises:
        OSError: its files cannot be read.
    """
    if not folder:
        return ""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        digest.update((Path(folder) / name).read_bytes())
    return f"adapter {digest.hexdigest()[:16]}"
