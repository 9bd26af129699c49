"""The repository's own modules, each read and parsed once."""

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("protocol", "services", "orchestrator", "launch")


def name(path: Path) -> str:
    """The path from the repository's root."""
    return path.relative_to(ROOT).as_posix()


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    parsed = ast.parse(source(path))
    gc.freeze()  # or each parse looks for garbage in all trees that there are
    return parsed


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module but contexts and operators."""
    marks = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
    return tuple(node for node in ast.walk(tree(path)) if not isinstance(node, marks))
