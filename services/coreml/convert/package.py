"""A program of several functions as a saved `.mlpackage` whose functions share their weights."""

import logging
import warnings
from pathlib import Path
from typing import Any

import coremltools as ct
from coremltools.converters.mil.converter import mil_convert
from coremltools.converters.mil.mil.passes import pass_pipeline
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipeline
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

# Our programs are float16, unfused and free of dead code already: of the common passes these
# remain. The pass manager would also check the whole program after each one, which takes most of a
# conversion.
_PASSES = [
    "common::const_elimination",
    "common::const_deduplication",
    "common::noop_elimination",
    "common::dedup_op_and_var_names",
    "common::canonicalize_inplace_pattern",
    "common::prefer_state_in_downstream",
    "common::dead_code_elimination",
]


def save(program: Any, path: Path) -> None:
    """Lower a MIL program and write it to `path`.

    The public converter writes the weights of every function separately (1285 MB instead of 272 for
    seven functions of a 135M model), and its optimisers refuse several functions. So the passes run
    here, then equal constants of different functions get one blob. These are internals of
    coremltools 9, which `pyproject.toml` pins; a test checks the size.
    """
    _quieten()
    for name in [*_PASSES, *PassPipeline.get_pipeline("backend_mlprogram").passes]:
        PASS_REGISTRY[name](program)
    deduplication: Any = PASS_REGISTRY["common::const_deduplication"]
    deduplication._deduplicate_const_across_functions(program)
    program.skip_all_passes = True
    program.export_as_multifunction = True
    with warnings.catch_warnings():
        # It leaves the removal of its scratch folder to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        model: Any = mil_convert(
            program,
            convert_from="milinternal",
            convert_to="mlprogram",
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            specification_version=ct.target.iOS18.value,
            pass_pipeline=PassPipeline([], "none"),
            skip_model_load=True,
        )
    model.save(str(path))


def _quieten() -> None:
    """Silence its progress bar and hints."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    pass_pipeline.tqdm = _bare


def _bare(items: Any, *_: Any, **__: Any) -> Any:
    return items
