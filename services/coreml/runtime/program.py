"""Execute the functions of a saved `.mlpackage` in numpy, op by op. A test instrument.

It reads the protobuf and the weight file that CoreML would read, so results hold for the package.
They say nothing about speed or placement on Apple hardware.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from coremltools.proto import Model_pb2

from protocol.errors import ModelError
from services.coreml.runtime.blob import DTYPES, FLOAT16, Array, Constants, shape_of, to_float16
from services.coreml.runtime.ops import CONSTANT_OPS, MOVES, OPS, OpInputs

Precision = Literal["float16", "float32"]
"""float16: every result is rounded to the type that the package declares. float32: float16
tensors keep float32, which tells errors of meaning from errors of rounding."""

State = dict[str, Array]


class _Name(str):
    """A value that another operation computes."""

    __slots__ = ()


class _Op(NamedTuple):
    kind: str
    inputs: dict[str, Any]
    """Constants, `_Name`s, or lists of both."""
    outputs: list[tuple[str, int, tuple[int, ...]]]
    """(name, data type, shape)."""
    last_uses: list[str]
    """Values that no later operation reads."""


class _Compiled(NamedTuple):
    constants: dict[str, Any]
    ops: list[_Op]
    inputs: dict[str, tuple[int, tuple[int, ...]]]
    states: dict[str, tuple[int, ...]]
    outputs: list[str]


class Program:
    """One saved package."""

    def __init__(self, path: Path, precision: Precision = "float16") -> None:
        """Read the package; raises ModelError if it is not one."""
        self._rounds = precision == "float16"
        try:
            manifest = json.loads((path / "Manifest.json").read_text(encoding="utf-8"))
            root = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
            model: Any = Model_pb2.Model()
            model.ParseFromString((path / "Data" / root).read_bytes())
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{str(path)!r} is not a CoreML package ({error!r})") from error
        self._functions = model.mlProgram.functions
        self._constants = Constants((path / "Data" / root).parent / "weights")
        self._decompressed: dict[tuple[int, ...], tuple[Array, OpInputs]] = {}
        self._compiled: dict[str, _Compiled] = {}

    def new_state(self, function: str) -> State:
        """Return zeros for every state of a function; functions with equal states may share it."""
        states = self._compile(function).states
        return {name: np.zeros(shape, np.float32) for name, shape in states.items()}

    def run(self, function: str, inputs: dict[str, Array], state: State) -> dict[str, Array]:
        """Return the outputs of a function; `state` is changed in place.

        Raises:
            ModelError: an input has another shape than the package declares.
        """
        compiled = self._compile(function)
        values: dict[str, Any] = dict(compiled.constants)
        for name, (kind, shape) in compiled.inputs.items():
            given = np.asarray(inputs[name])
            if given.shape != shape:
                raise ModelError(f"{function}: {name} is {given.shape}, not {shape}")
            values[name] = self._round(given, kind)
        for op in compiled.ops:
            self._step(op, values, state)
            for name in op.last_uses:
                del values[name]
        return {name: values[name] for name in compiled.outputs}

    def _step(self, op: _Op, values: dict[str, Any], state: State) -> None:
        inputs = {name: _resolve(value, values) for name, value in op.inputs.items()}
        if op.kind == "write_state":
            state[op.inputs["input"]] = inputs["data"]
            return
        if op.kind == "read_state":
            results: Any = state[op.inputs["input"]]
        else:
            results = OPS[op.kind](OpInputs(inputs))
        if not isinstance(results, tuple):
            results = (results,)
        for (name, kind, shape), result in zip(op.outputs, results, strict=True):
            if result.shape != shape:
                raise ModelError(f"{op.kind} {name!r} gave {result.shape}, declared {shape}")
            as_is = op.kind == "read_state" or op.kind in MOVES
            values[name] = result if as_is else self._round(result, kind)

    def _round(self, array: Array, kind: int) -> Array:
        if kind != FLOAT16:
            return array.astype(DTYPES[kind], copy=False)
        single: Array = array.astype(np.float32, copy=False)
        return to_float16(single) if self._rounds else single

    # ------------------------------------------------------------ loading

    def _compile(self, name: str) -> _Compiled:
        if name not in self._compiled:
            if name not in self._functions:
                raise ModelError(f"the package has no function {name!r}")
            self._compiled[name] = self._read(self._functions[name])
        return self._compiled[name]

    def _read(self, function: Any) -> _Compiled:
        block = function.block_specializations[function.opset]
        inputs, states = {}, {}
        for declared in function.inputs:
            kind, shape = shape_of(declared.type)
            if declared.type.WhichOneof("type") == "stateType":
                states[declared.name] = shape
            else:
                inputs[declared.name] = (kind, shape)
        constants: dict[str, Any] = {}
        ops: list[_Op] = []
        for operation in block.operations:
            self._read_op(operation, constants, ops)
        outputs = list(block.outputs)
        _free_early(ops, keep={*constants, *outputs, *states})
        return _Compiled(constants, ops, inputs, states, outputs)

    def _read_op(self, operation: Any, constants: dict[str, Any], ops: list[_Op]) -> None:
        kind = operation.type.split(".")[-1]
        if kind == "const":
            constants[operation.outputs[0].name] = self._constants.value(
                operation.attributes["val"]
            )
            return
        inputs = {
            name: self._argument(given, as_list=name == "values")
            for name, given in operation.inputs.items()
        }
        if kind in CONSTANT_OPS:
            given = {name: _resolve(value, constants) for name, value in inputs.items()}
            constants[operation.outputs[0].name] = self._decompress(kind, given)
            return
        if kind not in OPS and kind not in ("read_state", "write_state"):
            raise ModelError(f"the reference runtime does not know the operation {kind!r}")
        outputs = [(out.name, *shape_of(out.type)) for out in operation.outputs]
        ops.append(_Op(kind, inputs, outputs, []))

    def _argument(self, argument: Any, *, as_list: bool) -> Any:
        bound = [
            _Name(given.name)
            if given.WhichOneof("binding") == "name"
            else self._constants.value(given.value)
            for given in argument.arguments
        ]
        return bound if as_list or len(bound) > 1 else bound[0]

    def _decompress(self, kind: str, given: dict[str, Any]) -> Array:
        """Decompress once per constant: functions share the result."""
        key = tuple(id(value) for value in given.values())
        if key not in self._decompressed:
            inputs = OpInputs(given)  # kept, so that the ids stay taken
            self._decompressed[key] = (self._round(CONSTANT_OPS[kind](inputs), FLOAT16), inputs)
        return self._decompressed[key][0]


def _resolve(value: Any, values: dict[str, Any]) -> Any:
    """Return the value of an argument; a state's name is returned as it is."""
    if isinstance(value, _Name):
        return values.get(value, value)
    if isinstance(value, list):
        return [_resolve(one, values) for one in value]
    return value


def _free_early(ops: list[_Op], keep: set[str]) -> None:
    """Record for each operation which values nothing reads afterwards."""
    seen = set(keep)
    for op in reversed(ops):
        names: list[str] = [name for name, _, _ in op.outputs]
        for value in op.inputs.values():
            names += [one for one in (value if isinstance(value, list) else [value])
                      if isinstance(one, _Name)]  # fmt: skip
        for name in names:
            if name not in seen:
                seen.add(name)
                op.last_uses.append(name)
