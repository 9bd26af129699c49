"""The measures of the house, and its words, read from the source."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source import ROOMS, ROOT, name, nodes, source, tree

MOST_FILES = 20
MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 40
THE_MESSAGES = "protocol/messages.py"
"""Every message stands in one file, however long it is."""

NOT_PARTICIPLES = {"bed", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}
# fmt: off
IRREGULAR = {
    "born", "bound", "broken", "built", "done", "drawn", "driven", "fallen", "fed", "felt",
    "forgotten", "found", "given", "gone", "got", "grown", "had", "heard", "held", "hidden",
    "kept", "known", "laid", "learnt", "led", "left", "lent", "lost", "made", "meant", "met",
    "paid", "said", "seen", "sent", "shown", "spent", "spoken", "stolen", "taken", "taught",
    "thought", "thrown", "told", "understood", "won", "worn", "written"
}
# fmt: on

SYNONYMS = {
    "agenda": "queue",
    "answerer": "server",
    "bereave": "on_service_lost",
    "briefing": "sync",
    "comings": "events",
    "condemn": "mark_for_kill",
    "crowd": "batch",
    "doubt": "futility_test",
    "dues": "pending_replies",
    "elsewhere": "external",
    "farewell": "finish or shutdown",
    "foresee": "precompute",
    "gauge": "profiler",
    "law": "distribution",
    "laws": "distributions",
    "lesson": "observation",
    "lookahead": "num_draft_tokens",
    "muster": "readiness",
    "nonsense": "invalid message",
    "objection": "error",
    "pacer": "chunk_size",
    "patience": "timeout",
    "reach": "limit",
    "reception": "listener",
    "shelf": "catalog",
    "telling": "worker",
    "verb": "command",
    "verbs": "commands",
    "vigil": "hang_detector",
    "warden": "watchdog",
    "wish": "config",
    "yardstick": "reference",
}
"""Words that this code once had for things that the field has a word for, with that word."""

PROSE = re.compile(
    r"\b(of late|of yours|of theirs|nonsense|yardstick|is no more|so many as|is told|are told"
    r"|was told|who hangs|in vain|falls? silent|fell silent|says of itself|have to say"
    r"|makes? nothing of|knows? nothing of)\b",
    re.IGNORECASE,
)
"""Phrases that a native engineer would not write in a docstring, comment or message."""


def folders() -> list[Path]:
    """All folders of code, tests included."""
    tops = [ROOT / room for room in (*ROOMS, "tests")]
    found = {path.parent for top in tops for path in top.rglob("*.py")}
    return sorted(found)


def files(*tops: str) -> list[Path]:
    """All modules of these rooms."""
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a module."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def words(identifier: str) -> list[str]:
    """The words of a name, in lower case."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier)
    return [word for word in spaced.lower().split("_") if word]


def is_participle(word: str) -> bool:
    """Whether a word says what was done rather than what to do."""
    return word in IRREGULAR or (word.endswith("ed") and word not in NOT_PARTICIPLES)


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is read like an attribute: then it is a noun."""
    return any(
        (isinstance(one, ast.Name) and one.id in ("property", "cached_property"))
        or (isinstance(one, ast.Attribute) and one.attr in ("setter", "cached_property"))
        for one in node.decorator_list
    )


def defined(node: ast.AST) -> Iterator[str]:
    """The names that a node defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.arg():
            yield node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.attr
        case ast.AnnAssign(target=ast.Name(id=target)):
            yield target


def test_folders_are_small() -> None:
    """No folder holds more than about twenty modules, `__init__.py` aside."""
    counts = {
        name(folder): len([p for p in folder.glob("*.py") if p.name != "__init__.py"])
        for folder in folders()
    }
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_files_are_short(room: str) -> None:
    """No module has more than 400 lines, but for the one that holds every message."""
    lines = {name(p): len(source(p).splitlines()) for p in files(room)}
    assert [p for p, count in lines.items() if count > MOST_LINES and p != THE_MESSAGES] == []


@pytest.mark.parametrize("room", ROOMS)
def test_functions_are_short(room: str) -> None:
    """No function is longer than 40 lines, the table of a command's options aside."""
    long = {
        f"{name(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in files(room)
        for node in functions(path)
    }
    assert {where: count for where, count in long.items() if count > MOST_LINES_OF_A_FUNCTION} == {}


def test_a_public_class_has_one_definition() -> None:
    """No two modules define a public class of the same name."""
    homes = defaultdict(list)
    for path in files(*ROOMS):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name(path))
    assert {one: where for one, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_functions_are_verbs(room: str) -> None:
    """No function's name begins with a participle; properties are nouns and may."""
    found = {
        f"{name(path)}:{node.name}"
        for path in files(room)
        for node in functions(path)
        if is_participle((words(node.name) or [""])[0]) and not is_property(node)
    }
    assert sorted(found) == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_private_synonyms(room: str) -> None:
    """Names use the field's words."""
    found = {
        f"{name(path)}: {one} ({SYNONYMS[word]})"
        for path in files(room)
        for node in nodes(path)
        for one in defined(node)
        for word in words(one)
        if word in SYNONYMS
    }
    found |= {
        f"{name(path)} ({SYNONYMS[word]})"
        for path in files(room)
        for word in words(path.stem)
        if word in SYNONYMS
    }
    assert sorted(found) == []


@pytest.mark.parametrize("room", ROOMS)
def test_prose_is_plain(room: str) -> None:
    """Docstrings, comments and messages are written as a native engineer would."""
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in files(room)
        for number, line in enumerate(source(path).splitlines(), 1)
        if PROSE.search(line)
    ]
    assert found == []


QUAINT = re.compile(
    r"\b(nobody|somebody|stands|beside|so many|unasked|likeliest|in the making|who comes"
    r"|with one another)\b",
    re.IGNORECASE,
)
"""Words that are to go from docstrings, comments and messages."""

OPENINGS = re.compile(r"(What|Whether|Of|As|The same|See)\b")
"""Words that no docstring begins with: it is an imperative sentence, or defines something."""

# They may only fall: whoever rewrites a room lowers its numbers.
MOST_QUAINT_LINES = {"protocol": 0, "services": 4, "orchestrator": 0, "launch": 0}
MOST_OPENINGS = {"protocol": 0, "services": 10, "orchestrator": 0, "launch": 0}


@pytest.mark.parametrize("room", ROOMS)
def test_quaint_words_become_fewer(room: str) -> None:
    """No more lines of a room have them than before."""
    count = sum(
        QUAINT.search(line) is not None
        for path in files(room)
        for line in source(path).splitlines()
    )
    assert count <= MOST_QUAINT_LINES[room]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_are_sentences(room: str) -> None:
    """No more docstrings of a room than before begin with `What`, `Whether` and the like."""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    count = sum(
        OPENINGS.match(ast.get_docstring(node) or "") is not None
        for path in files(room)
        for node in nodes(path)
        if isinstance(node, described)
    )
    assert count <= MOST_OPENINGS[room]


# fmt: off
VAGUE = {
    "asked", "begun", "found", "given", "handed", "known", "one", "own", "said", "seen", "told",
    "wanted"
}
# fmt: on
"""Names that do not say what they hold."""
MOST_VAGUE_NAMES = {"protocol": 0, "services": 388, "orchestrator": 0, "launch": 0, "tests": 822}
"""They may only fall, too."""


@pytest.mark.parametrize("room", MOST_VAGUE_NAMES)
def test_locals_say_what_they_hold(room: str) -> None:
    """No more variables, parameters and fields of a room than before have a vague name."""
    vague = {
        (path, local, node.lineno)
        for path in files(room)
        for node in nodes(path)
        if isinstance(node, ast.Name | ast.arg)
        for local in bound(node)
        if local in VAGUE
    }
    assert len(vague) <= MOST_VAGUE_NAMES[room]


def bound(node: ast.Name | ast.arg) -> list[str]:
    """The name that a node binds, if it does."""
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.id] if isinstance(node.ctx, ast.Store) else []


MOVERS = {
    "protocol/process/files.py",
    "services/coreml/runtime/native.py",  # from a folder that `files` made
    "services/kernels/cpu/build.py",  # from a folder that `tempfile` made
}


def test_files_are_moved_into_place_in_one_module() -> None:
    """Whoever writes beside a file does so by `files`, which makes its temporary file anew."""
    found = {
        name(path)
        for room in ROOMS
        for path in files(room)
        for node in nodes(path)
        if isinstance(node, ast.Call) and _moves_a_file(node)
    }
    assert found == MOVERS


def _moves_a_file(call: ast.Call) -> bool:
    """By `os` or `shutil`, `rename`, or a `replace` that is not a string's or a struct's."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.value.id in {"os", "shutil"}:
        return function.attr in {"rename", "renames", "replace", "move"}
    is_path = function.attr == "replace" and len(call.args) == 1 and not call.keywords
    return is_path or function.attr == "rename"


DATED = {
    "launch/stack/snapshot.py", "protocol/process/orphans.py",
    "services/gateway/dialects/base.py", "services/gateway/server_info.py",
}  # fmt: skip
"""Modules that show a date, or how long a process has run."""


def test_no_decision_depends_on_the_date() -> None:
    """The system's clock may be set at any time, by an hour or a year."""
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"\btime\.time\(", source(path))
    }
    assert found == DATED
