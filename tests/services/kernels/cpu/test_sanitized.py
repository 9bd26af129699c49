"""The C program built with sanitizers, over random shapes, families, lengths and companies."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.kernels.cpu.build import compile_library

FLAGS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

EXERCISES = """
import ctypes, sys
from services.kernels.cpu import library
library._Loaded.done = True
library._Loaded.kernels = ctypes.CDLL(sys.argv[1])
from tests.services.kernels.cpu import test_attention, test_decoder, test_products
test_products.test_products_are_those_of_the_weights_in_the_file()
test_products.test_all_instruction_sets_and_companies_give_the_same_bits()
for stored, bits in ((0, 8), (5, 4), (6, 4), (8, 4)):
    for dtype in test_products.TYPES:
        test_products.test_weights_of_more_bits_can_be_rounded(stored, bits, dtype)
for bad in ("nan", "inf", "-inf"):
    test_products.test_what_is_no_number_is_none_when_rounded(float(bad))
test_attention.test_every_layout_of_heads()
for family in ("quantized", "gemma2", "gemma3"):
    test_decoder.test_a_row_has_the_same_bits_in_any_company(family)
test_decoder.test_all_instruction_sets_compute_the_same_bits("gemma3")
test_decoder.test_sequences_that_share_a_pass_change_no_bit("gemma3")
print("done")
"""


def find_runtimes() -> list[str]:
    """The compiler's sanitizer libraries, which must be loaded before Python."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        return []
    paths = [
        subprocess.check_output([compiler, f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    return paths if all(Path(path).is_absolute() for path in paths) else []


@pytest.mark.kernel
def test_nothing_is_read_or_written_out_of_bounds(tmp_path: Path) -> None:
    """Nor is anything undefined computed: either ends the process."""
    runtimes = find_runtimes()
    if not runtimes:
        pytest.skip("the compiler has no sanitizers")
    library = tmp_path / "sanitized.so"
    compile_library(library, FLAGS)
    root = str(Path(__file__).parents[4])
    run = subprocess.run(
        [sys.executable, "-c", EXERCISES, str(library)],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        },
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "done"
