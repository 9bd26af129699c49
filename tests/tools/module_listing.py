"""`python -m tests.tools.module_listing`: writes docs/modules.md, a line for every module.

The line is the first of the module's docstring, so there is nothing to keep up by hand.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTING = ROOT / "docs" / "modules.md"

_PACKAGES = ("protocol", "orchestrator", "services", "launch", "tests/support", "tests/chaos")
_SOURCES = (".py", ".c", ".cuh", ".html")
_HEAD = """\
# Modules

Written by `make tree` from the first line of each module's docstring. Folders in a few words, and \
how they work together: [architecture.md](architecture.md).
"""


def modules() -> list[Path]:
    """All source files that the listing names, relative to the repository."""
    found = [ROOT / "ssd_decode/__init__.py", ROOT / "mlx_ssd.py"]
    for package in _PACKAGES:
        found += [p for p in (ROOT / package).rglob("*") if p.suffix in _SOURCES]
    relative = [path.relative_to(ROOT) for path in found]
    return sorted(
        p
        for p in relative
        if (p.name != "__init__.py" or p.parent.name == "ssd_decode")
        and "__pycache__" not in p.parts
    )


def listing() -> str:
    """The page: a heading for each folder, and a line for each module in it."""
    return "".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    folder = None
    for path in sorted(modules(), key=lambda p: (_order(p), p.parent, p.name)):
        if path.parent != folder:
            folder = path.parent
            purpose = _summary(folder / "__init__.py") if folder != Path() else ""
            yield f"\n## {folder if folder != Path() else 'The package'}\n\n"
            if purpose:
                yield f"{purpose}\n\n"
        yield f"- `{path}`: {_summary(path)}\n"


def _order(path: Path) -> int:
    """The rooms in the order in which one reads them."""
    return next((i for i, p in enumerate(_PACKAGES) if path.is_relative_to(p)), -1)


def _summary(path: Path) -> str:
    """The first line of a module's docstring; of other sources the first comment, or the title."""
    if not (ROOT / path).exists():
        return ""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    said = re.search(r"(?://|/\*|<title>)\s*(.+?)\s*(?:\*/|</title>|$)", text, re.MULTILINE)
    return said[1] if said else ""


if __name__ == "__main__":
    LISTING.write_text(listing(), encoding="utf-8")
