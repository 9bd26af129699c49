"""The arrows between the rooms, read from the source; `test_house.py` has the measures."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
ROOMS = ("protocol", "services", "orchestrator", "launch")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

MAY_IMPORT = {
    "protocol": {"protocol"},
    "services": {"services", "protocol"},
    "orchestrator": {"orchestrator", "protocol"},
    "launch": {"launch", "orchestrator", "protocol"},
}
# A library on the left is imported only in the rooms on the right.
HOMES = {
    "zmq": {"protocol"},
    "mlx": {"services"},
    "mlx_lm": {"services"},
    "click": {"launch"},
    "llguidance": {"protocol"},
    "starlette": {"services"},
    "uvicorn": {"services"},
    "prometheus_client": {"services"},
    "matplotlib": {"launch"},
    "rich": {"launch"},
    "prompt_toolkit": {"launch"},
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source(path))))


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, wherever in the file it does."""
    found: set[str] = set()
    for node in nodes(path):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
            case ast.ImportFrom():
                found.add(room(path))
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                found.add(module.partition(".")[0])
    return found


Found = TypeVar("Found")


def offenders(find: Callable[[Path], Iterable[Found]]) -> dict[str, list[Found]]:
    """What `find` finds, by file; files in which it finds nothing are left out."""
    found = {name(path): list(find(path)) for path in FILES}
    return {path: finds for path, finds in found.items() if finds}


def test_all_rooms_are_looked_at() -> None:
    """The tests below are about the files that there are."""
    assert set(ROOMS) == {room(path) for path in FILES}
    assert len(FILES) > 30
    assert "numpy" in imported(ROOT / "protocol" / "decoding" / "sampler.py")
    assert "zmq" in imported(ROOT / "protocol" / "transport" / "channel.py")


def test_rooms_import_only_what_they_may() -> None:
    """Imports obey launch -> orchestrator -> protocol <- services."""

    def strangers(path: Path) -> set[str]:
        return (imported(path) & {*ROOMS, "ssd_decode", "tests"}) - MAY_IMPORT[room(path)]

    assert offenders(strangers) == {}


def test_libraries_stay_in_their_rooms() -> None:
    """zmq is the protocol's, MLX the services', click the launcher's."""

    def strangers(path: Path) -> set[str]:
        return {
            library for library in imported(path) if room(path) not in HOMES.get(library, ROOMS)
        }

    assert offenders(strangers) == {}


def test_coremltools_stays_in_its_room() -> None:
    """Only services/coreml knows the library whose internals it leans on."""
    users = {name(path) for path in FILES if "coremltools" in imported(path)}
    assert users
    assert all(path.startswith("services/coreml/") for path in users)


def test_only_the_launcher_prints() -> None:
    """print() is called only in launch/."""

    def prints(path: Path) -> list[int]:
        found = [n.lineno for n in nodes(path) if isinstance(n, ast.Name) and n.id == "print"]
        return found if room(path) != "launch" else []

    assert offenders(prints) == {}


def test_only_the_configuration_reads_the_environment() -> None:
    """os.environ and os.getenv appear only in launch/settings/, and where MLX's own variable says
    where its files are."""
    theirs = "services/mlx/cuda/disk_cache.py"
    words = {"environ", "environb", "getenv"}

    def reads(path: Path) -> Iterator[int]:
        for node in nodes(path):
            match node:
                case ast.Attribute(attr=word) | ast.Name(id=word) if word in words:
                    yield node.lineno
                case ast.ImportFrom(names=names) if words & {alias.name for alias in names}:
                    yield node.lineno

    found = offenders(reads).keys() - {theirs}
    assert {str(Path(path).parent) for path in found} == {"launch/settings"}


def test_no_error_is_swallowed() -> None:
    """No bare `except`, and none whose whole body is `pass`."""

    def silent(path: Path) -> list[int]:
        handlers = [node for node in nodes(path) if isinstance(node, ast.ExceptHandler)]
        return [
            handler.lineno
            for handler in handlers
            if handler.type is None or all(isinstance(step, ast.Pass) for step in handler.body)
        ]

    assert offenders(silent) == {}
