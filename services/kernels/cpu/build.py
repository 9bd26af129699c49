"""Compiling the CPU kernels, once per environment and version, each instruction set by itself."""

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HOME = Path(__file__).with_name("c")
_COMPILE_S = 240.0
_FLAGS = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fPIC", "-pthread", "-Wno-psabi")
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""No product and sum are contracted into one rounding, which portable C would not have."""

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_X86: dict[str, tuple[str, tuple[str, ...]]] = {
    "portable": ("portable", ()),
    "avx2": ("avx2", _AVX2),
    "avxvnni": ("avx2", (*_AVX2, "-mavxvnni")),
    "avx512": (
        "avx512",
        (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
    ),
}
_ARM = {"portable": ("portable", ()), "neon": ("neon", ("-march=armv8.2-a+dotprod+fp16",))}
_SETS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "x86_64": _X86,
    "aarch64": _ARM,
    "arm64": _ARM,
}


def sources() -> list[Path]:
    """All files that the program is made of."""
    return sorted(_HOME.rglob("*.[ch]"))


def compile_library(library: Path, flags: Sequence[str] = ()) -> None:
    """Compile beside the library's place and move it there, as another process may do the same.

    Args:
        library: the file to make.
        flags: of the compiler, after the usual ones.

    Raises:
        OSError, SubprocessError: there is no compiler, or it fails.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler `cc`")
    common = [path for path in _HOME.glob("*.c") if path.name != "kernels.c"]
    base = [compiler, *_FLAGS, f"-I{_HOME}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        folder = Path(name)
        commands = [
            [
                *(*base, *_EXACT, *own, *flags, f'-DSSD_ISA="isa/{header}.h"'),
                *("-c", str(_HOME / "kernels.c"), "-o", str(folder / f"{isa}.o")),
            ]
            for isa, (header, own) in _SETS.get(
                platform.machine(), {"portable": ("portable", ())}
            ).items()
        ]
        _run_all(commands)
        objects = [str(path) for path in sorted(folder.glob("*.o"))]
        built = folder / library.name
        link = [*base, "-O3", "-shared", "-Wl,-Bsymbolic", *flags, *map(str, common), *objects]
        _run_all([[*link, "-o", str(built), "-lm"]])
        built.replace(library)


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run these at the same time."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for command in commands
    ]
    try:
        for process, command in zip(running, commands, strict=True):
            _, errors = process.communicate(timeout=_COMPILE_S)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)
    finally:
        for process in running:
            process.kill()
            process.wait()
