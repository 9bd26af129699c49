"""Configurations of tiny models whose layers hold more than keys and values.

Every family of mlx-lm whose caches are not all of one kind, but for muse_spark, which computes
with kernels for Metal alone; `tiny_models` adds what all families share.
"""

from tests.support.families.attention import NESTED, WINDOWED
from tests.support.families.recurrent import CONVOLUTIONS, DELTA_NETS, FED_AGAIN, MAMBAS

RECURRENT_DRAFTERS = ("qwen3_5", "lfm2", "granite4", "mamba2", "nemotron_h", "kimi_linear")
"""Families with recurrent layers whose branches grow as a batch."""

LAYERED = DELTA_NETS | CONVOLUTIONS | MAMBAS | FED_AGAIN | WINDOWED | NESTED
"""Every family, by name."""
