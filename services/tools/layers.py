"""`python -m services.tools.layers FOLDER`: a model's kinds of layers, as one line of JSON.

The model is built from its configuration; only names and shapes of its weights are read.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
from mlx_lm.utils import _get_classes

from protocol.errors import ModelError
from protocol.jobs.layers import LayersReport
from protocol.process.child import run_reporting_errors
from services.kv.rewinding import predict_rewinding
from services.mlx.loader import load_skeleton


def describe_layers(folder: Path) -> LayersReport:
    """Describe the layers; raises ModelError if the model is missing or unsupported."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        model_class, arguments_class = _get_classes(config=config)
        model = model_class(arguments_class.from_dict(config))
        rewinding = predict_rewinding(model)
    # mlx-lm raises errors of any kind for a broken configuration.
    except Exception as error:
        raise ModelError(f"the layers of {str(folder)!r} are not known: {error}") from error
    return LayersReport(rewinding, _find_misfit(folder))


def _find_misfit(folder: Path) -> str:
    if next(folder.glob("*.safetensors"), None) is None:
        return ""
    try:
        load_skeleton(folder)
    except ModelError as error:
        return str(error)
    return ""


def _run() -> None:
    report = describe_layers(Path(sys.argv[1]))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    sys.exit(run_reporting_errors("layers", _run))
