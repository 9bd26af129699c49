"""The documents name what exists: modules, paths, definitions, links and flags."""

import ast
import re
from pathlib import Path

import click
import msgspec
import pytest

from launch.cli import cli
from launch.help_text import commands
from launch.settings.settings import StackSettings

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRODUCT = ("protocol", "orchestrator", "services", "launch")
_ROOMS = (*PRODUCT, "tests", "docs")
_PATH = re.compile(rf"`((?:{'|'.join(_ROOMS)})/[\w./-]*)(?::([\w.]+))?`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
COMMANDS = dict(commands(cli))
_CODE = re.compile(r"```.*?```", re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_folder_stands_in_the_architecture() -> None:
    """docs/architecture.md says in a line what each package holds."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [path for room in PRODUCT for path in (ROOT / room).rglob("*.py")]
    packages = {name(path.parent) for path in modules if path.name != "__init__.py"}
    assert [folder for folder in sorted(packages) if f"`{folder}/`" not in page] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_paths_in_documents_exist(document: Path) -> None:
    """A path in backticks is a file or folder, and what follows its colon is defined there."""
    for path, definition in _PATH.findall(document.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{path} does not exist"
        assert not definition or definition in defined(ROOT / path), f"{path} has no {definition}"


def defined(path: Path) -> set[str]:
    """Names of a module's functions, classes, methods and constants."""
    found = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            found |= {f"{node.name}.{m.name}" for m in methods}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    """A relative link names a file, and a heading that is in it."""
    for target, anchor in _LINK.findall(document.read_text(encoding="utf-8")):
        page = (document.parent / target).resolve() if target else document
        assert page.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(page), f"{target or 'the page'} has no #{anchor}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub makes links of them."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_settings_without_a_flag_stand_in_the_guide() -> None:
    """What only a variable or ssd.toml can set is in the settings' page, with its default."""
    page = (ROOT / "docs" / "guide" / "settings.md").read_text(encoding="utf-8")
    # `serve` has those of `launch`, and some of its own.
    flags = {parameter.name for parameter in COMMANDS["serve"].params} | {"http"}
    fields = [f for f in msgspec.structs.fields(StackSettings) if f.name not in flags]
    rows = [f"| `{field.name}` | {shown(field.default)} |" for field in fields]
    assert [row for row in rows if row not in page] == []


def shown(default: object) -> str:
    """A default as the guide prints it."""
    if isinstance(default, bool):
        return str(default).lower()
    return str(default or "none") if isinstance(default, str) else format(default, ".15g")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_in_documents_have_the_flags_they_are_shown_with(document: Path) -> None:
    """Each `ssd COMMAND --flag` of an example is a command, and a flag that it shows."""
    text = re.sub(r"\\\n\s*", "", document.read_text(encoding="utf-8"))
    for words, rest in re.findall(r"\bssd ((?:[a-z][a-z-]+ ?)+)([^`\n]*)", text):
        command = find_command(words.split())
        if command is None:
            continue
        shown = {option for parameter in command.params for option in options(parameter)}
        unquoted = re.sub(r'"[^"]*"', "", rest).partition("#")[0]
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", unquoted))
        missing = used - shown
        assert not missing, f"`ssd {words.strip()}` has no {', '.join(sorted(missing))}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_that_documents_name_exist(document: Path) -> None:
    """In backticks the word behind `ssd` is a command."""
    text = _CODE.sub("", document.read_text(encoding="utf-8"))
    named = set(re.findall(r"`ssd ([a-z][a-z-]*)[^`]*`", text))
    assert named - {command.split()[0] for command in COMMANDS} == set()


def find_command(words: list[str]) -> click.Command | None:
    """The command that these words begin with; None if they are prose."""
    found = words[0]
    for word in words[1:]:
        if f"{found} {word}" in COMMANDS:
            found = f"{found} {word}"
    return COMMANDS.get(found)


def options(parameter: click.Parameter) -> list[str]:
    hidden = isinstance(parameter, click.Option) and parameter.hidden
    return [] if hidden else [*parameter.opts, *parameter.secondary_opts, "--help"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_modules_that_documents_run_exist(document: Path) -> None:
    """`python -m MODULE` in a page names a module of ours."""
    text = document.read_text(encoding="utf-8")
    for module in re.findall(rf"python -m ((?:{'|'.join(_ROOMS)})(?:\.\w+)+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_documents_are_short() -> None:
    """The README is read in one sitting, and all pages in an afternoon; counted as `wc -w` does."""
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in DOCUMENTS}
    assert words[ROOT / "README.md"] <= 1_100
    assert sum(words.values()) <= 30_000


def test_pictures_that_pages_show_exist() -> None:
    """A picture that the README shows is in the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for picture in re.findall(r'(?:!\[[^\]]*\]\(|src=")([^)"]+)', text):
        assert picture.startswith("https://") or (ROOT / picture).is_file(), picture
