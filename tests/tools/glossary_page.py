"""`python -m tests.tools.glossary_page`: writes docs/glossary.md from `protocol/glossary.py`."""

from collections.abc import Iterator
from pathlib import Path

import protocol.glossary

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "glossary.md"
_HEAD = """\
# Glossary

Written by `make glossary` from `protocol/glossary.py`. The symbols are those of the paper (arXiv \
2603.03251); what is not here means what it means in vLLM and mlx-lm.

| word | symbol | meaning |
|---|---|---|
"""


def glossary() -> str:
    """The page."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in _read_rows())


def _read_rows() -> Iterator[list[str]]:
    """Word, symbol and meaning; lines without a word go on with the row before."""
    rows: list[list[str]] = []
    for line in (protocol.glossary.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.strip().startswith("|") or set(line) <= set("|- "):
            continue
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    yield from rows[1:]


if __name__ == "__main__":
    PAGE.write_text(glossary(), encoding="utf-8")
