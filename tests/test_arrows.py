"""The arrows between the rooms, read from the source; `test_house.py` has the measures."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from tests.source import ROOMS, ROOT, name, nodes, source, tree

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


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@cache
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
    theirs = "services/kernels/cuda/disk_cache.py"
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


def test_one_file_changes_the_classes_of_layers() -> None:
    """Whatever changes a layer's calls is a patch, which can be undone."""

    def assigns(path: Path) -> list[int]:
        stores = [n for n in nodes(path) if isinstance(n, ast.Attribute) and n.attr == "__class__"]
        return [node.lineno for node in stores if isinstance(node.ctx, ast.Store)]

    assert list(offenders(assigns)) == ["services/mlx/patches.py"]


# ---------------------------------------------------------------- the way of a request

ENTRANCES = (
    *(f"launch.commands.{command}" for command in ("generate", "serve", "launch", "chat")),
    "launch.cli",
    "orchestrator.main",
    "services.verifier.main",
    "services.drafter.main",
    "services.gateway.main",
)
# Who imports what, inside a function, only if a setting or a request names it.
ASKED_FOR = {
    "launch.commands.serve": {"launch.serving"},
    "launch.models.hub": {"launch.models.gguf_models"},
    "launch.models.pair": {"launch.keyring", "launch.models.programs", "protocol.heads"},
    "launch.stack.session": {"launch.models.programs"},
    "launch.stack.spawn": {"launch.settings.ranks"},
    "services.verifier.open_target": {"services.ranks"},
    "launch.settings.flags": {"launch.help_text"},
    "launch.terminal.chat": {"launch.terminal.statistics"},
    "launch.terminal.generate": {
        "launch.terminal.explain",
        "launch.terminal.statistics",
        "launch.terminal.trace",
    },
    "orchestrator.requests.admission": {"orchestrator.telemetry.timeline"},
    "protocol.decoding.logits_processor": {"protocol.decoding.closing"},
    "protocol.transport.channel": {"protocol.transport.curve"},
    "services.gateway.app": {
        "services.gateway.dialects.completions",
        "services.gateway.dialects.conversations",
        "services.gateway.dialects.messages",
        "services.gateway.dialects.messages_reply",
        "services.gateway.dialects.responses_reply",
    },
    "services.gateway.server_info": {"services.gateway.web"},
    "services.gateway.dialects.content": {"services.gateway.dialects.blocks"},
    "services.gateway.models": {"protocol.client.model_client"},
    "services.gateway.task": {"services.gateway.answer_grammar"},
    "services.gateway.transcript": {"services.gateway.tools"},
    "services.gateway.turns": {"services.gateway.tools"},
    "services.drafter.backends.growth": {"protocol.decoding.rejection"},
    "services.verifier.acceptance": {"protocol.decoding.rejection"},
    "services.verifier.feature_source": {"services.mlx.taps", "services.verifier.feature_log"},
    "services.verifier.main": {
        "protocol.adapter",
        "services.coreml",
        "services.kv.prefix_cache_file",
    },
    "services.drafter.main": {"services.drafter.relay", "services.drafter.backends.line_client"},
    "services.drafter.backends.factory": {
        "services.coreml",
        "services.drafter.backends.coreml",
        "services.drafter.backends.head",
    },
}
ASIDE = (
    *("services.distill", "services.coreml", "services.ranks", "services.tools"),
    *("orchestrator.simulation", "launch.bench", "launch.doctor", "launch.workers.kernel_report"),
)
"""Rooms that answer no request."""
MOST_LINES = 37_107
"""Lines that one request may reach. They may only become fewer."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def edges(path: Path) -> frozenset[tuple[str, bool]]:
    """The modules of ours that a file imports, and whether a function does; types do not count."""
    imports, todo = set[tuple[str, bool]](), [(tree(path), False)]
    while todo:
        node, inside = todo.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.expr():
                continue
            case ast.Import(names=names):
                named = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0, names=names):
                named = [module, *(f"{module}.{alias.name}" for alias in names)]
            case _:
                named = []
        imports |= {(module, inside) for module in named if module in MODULES}
        inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        todo += [(child, inside) for child in ast.iter_child_nodes(node)]
    return frozenset(imports)


def is_in(module: str, rooms: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


@cache
def on_the_way() -> frozenset[str]:
    """All modules that are imported, early or late, until a request is answered."""
    found, todo = set[str](), list(ENTRANCES)
    while todo:
        module = todo.pop()
        if module in found:
            continue
        found.add(module)
        asked_for = ASKED_FOR.get(module, set())
        for other, inside in edges(MODULES[module]):
            if not (inside and is_in(other, asked_for)):
                todo.append(other)
    return frozenset(found)


def test_a_request_meets_no_room_beside_its_way() -> None:
    """Distillation, CoreML, ranks, the simulator, benchmarks and reports load only by name."""
    assert len(on_the_way()) > 100
    assert sorted(module for module in on_the_way() if is_in(module, ASIDE)) == []


def test_what_is_asked_for_by_name_is_there() -> None:
    """The exceptions above are imports that exist."""
    for module, rooms in ASKED_FOR.items():
        late = {other for other, inside in edges(MODULES[module]) if inside}
        assert all(any(is_in(other, [room]) for other in late) for room in rooms), module


def test_a_request_can_be_followed(record_property: Callable[[str, object], None]) -> None:
    """Whoever reads how a request is answered has a bounded number of lines to read."""
    lines = sum(len(source(MODULES[module]).splitlines()) for module in on_the_way())
    record_property("lines reachable from one request", lines)
    assert lines <= MOST_LINES


# ---------------------------------------------------------------- inside the services

# Of kernels, nothing knows how a request is answered: they are given arrays and layers.
BATCH = "services.engine.batch"
KERNELS_KNOW = (BATCH, "services.kernels", "services.mlx", "services.runtime.preparation")


def imports_of(path: Path) -> set[str]:
    """The modules of ours that a file imports, early or late."""
    return {module for module, _ in edges(path)}


def service_of(module: str) -> str:
    """The room of a module of the services; what a pass is over stands apart."""
    return BATCH if module == BATCH else module.split(".")[1]


def test_kernels_know_nothing_of_the_engine() -> None:
    """Sequences, caches, batches and policies are above them."""

    def strangers(path: Path) -> list[str]:
        if not module_of(path).startswith("services.kernels."):
            return []
        ours = (module for module in imports_of(path) if module.startswith("services."))
        return sorted(m for m in ours if not is_in(m, KERNELS_KNOW))

    assert offenders(strangers) == {}


def test_no_rooms_of_services_import_each_other() -> None:
    """Arrows between two rooms go one way."""
    arrows = {
        (service_of(module_of(path)), service_of(other))
        for path in FILES
        if room(path) == "services" and path.parent.name != "services"
        for other in imports_of(path)
        if other.startswith("services.")
    }
    assert {(a, b) for a, b in arrows if a < b and (b, a) in arrows} == set()
