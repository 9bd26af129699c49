"""Processes that only compute do without mlx-lm's tokenizers."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.tiny_models import write_adapter, write_tiny_model

_PROGRAM = """
import json, sys
from pathlib import Path
from services.mlx.lean_imports import leave_out_unused_libraries
leave_out_unused_libraries()
from services.mlx.loader import load
import mlx.core as mx
module = load(Path(sys.argv[1]), adapter=sys.argv[2]).module
found = module(mx.array([[5, 6, 7]]))[0, -1].argmax().item()
specs = [sys.modules[name].__spec__ for name in ("transformers", "huggingface_hub")]
print(json.dumps([found, [spec.name for spec in specs if spec.origin]]))
"""


@pytest.mark.processes
def test_a_model_loads_and_computes_without_them(tmp_path: Path) -> None:
    """An adapter too; and neither library is imported."""
    model = write_tiny_model(tmp_path / "model", "quantized")
    adapter = write_adapter(tmp_path / "adapter", model)
    command = [sys.executable, "-c", _PROGRAM, str(model), str(adapter)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    token, imported = json.loads(done.stdout.splitlines()[-1])
    assert token in range(320)
    assert imported == []


def test_no_architecture_needs_them() -> None:
    """mlx-lm imports a model's module when it is loaded."""
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    modules = sorted(Path(spec.submodule_search_locations[0], "models").rglob("*.py"))
    needs = re.compile(r"^\s*(import|from) (transformers|huggingface_hub)\b", re.MULTILINE)
    assert len(modules) > 50
    assert [m.name for m in modules if needs.search(m.read_text(encoding="utf-8"))] == []
