"""coremltools' builder of programs. Its operations are attributes made at run time: untyped."""

from typing import Any

import coremltools as ct
from coremltools.converters.mil import Builder, mil
from coremltools.converters.mil.mil import types as _types

mb: Any = Builder
types: Any = _types
Function: Any = mil.Function
Program: Any = mil.Program
OPSET: Any = ct.target.iOS18
"""The first that has states; macOS 15."""
