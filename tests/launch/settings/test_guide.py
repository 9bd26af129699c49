"""The guide's tables of settings: what they say is what is enforced."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from launch.settings.settings import StackSettings, stack_settings
from protocol.errors import UsageError

GUIDE = Path(__file__).parents[3] / "docs" / "guide"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def read_rows() -> Iterator[tuple[str, str, str]]:
    """Setting, default and meaning of each row in a table of settings."""
    for page in ("settings.md", "concurrency.md"):
        text = (GUIDE / page).read_text(encoding="utf-8")
        for line in text.splitlines():
            if found := re.fullmatch(r"\| `(?:--)?([a-z_-]+)` \| ([^|]*) \| ([^|]*)\|", line):
                yield found[1].replace("-", "_"), found[2], found[3]


def test_the_guides_settings_are_enforced() -> None:
    """Defaults are as given; 0 is accepted where the guide gives it a meaning; less is refused."""
    rows = {name: (default, meaning) for name, default, meaning in read_rows()}
    assert {"max_stop_bytes", "decode_concurrency"} <= rows.keys()
    fields = {field.name for field in msgspec.structs.fields(StackSettings)}
    assert rows.keys() <= fields
    for name, (default, meaning) in rows.items():
        value = getattr(StackSettings(), name)
        if found := re.fullmatch(r"([\d.]+) ?(\w*)", default):
            assert value == float(found[1]) * UNITS[found[2]], name
        if isinstance(value, str):
            continue
        assert getattr(stack_settings({name: value}), name) == value
        if "0 is" in meaning:
            assert getattr(stack_settings({name: 0}), name) == 0
        with pytest.raises(UsageError, match=name):
            stack_settings({name: -1})
