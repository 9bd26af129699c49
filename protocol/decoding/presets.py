"""Sampling parameters for a purpose, one name for each."""

from typing import Any, Literal

PresetName = Literal["default", "greedy", "creative", "conservative"]

_PRESETS: dict[PresetName, dict[str, Any]] = {
    # Greedy, as mlx-lm's own default is: the same answer every time, and the best acceptance.
    "default": {},
    "greedy": {"temperature": 0.0},
    "creative": {"temperature": 1.0, "top_p": 0.95, "min_p": 0.05},
    "conservative": {"temperature": 0.3, "top_p": 0.9},
}
PRESETS: tuple[PresetName, ...] = tuple(_PRESETS)


def preset(name: PresetName) -> dict[str, Any]:
    """What a preset says; other parameters keep their defaults."""
    return dict(_PRESETS[name])
