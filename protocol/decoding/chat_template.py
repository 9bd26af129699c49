"""Chat templates: programs shipped with a model that turn conversations into prompts.

They run in Jinja's immutable sandbox, which protects the process but bounds neither time nor
memory; `limit_work` does.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Sized
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
import psutil
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_BITS = 4096
_MOST_ITEMS = 1 << 22
"""Size limit of a product: a single operation cannot be interrupted."""


class OutOfBounds(Exception):  # caught where the limit is set
    """The work exceeded its time limit."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox with bounded products and powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power, if it is small."""
        sizes = [_measure(left), _measure(right)]
        if operator == "**" and isinstance(right, int):
            sizes = [sizes[0] * max(1, abs(right))]
        counts = [len(operand) for operand in (left, right) if isinstance(operand, Sized)]
        factors = [operand for operand in (left, right) if isinstance(operand, int)]
        if sum(sizes) > _MOST_BITS or (counts and factors and counts[0] * factors[0] > _MOST_ITEMS):
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _measure(value: Any) -> int:
    """Return the number of bits of an integer."""
    return value.bit_length() if isinstance(value, int) else 1


def read_template(folder: Path, config: dict[str, Any]) -> str:
    """Return a model folder's chat template; `config` is its tokenizer's; empty without one."""
    file = folder / "chat_template.jinja"
    source: Any = file.read_text(encoding="utf-8") if file.is_file() else None
    source = source or config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else ""


def compile_template(source: str) -> jinja2.Template:
    """Compile a template with the settings of mlx-lm and `transformers`.

    Raises jinja2.TemplateError.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    """Raise the error of a chat template that rejects a conversation."""
    raise jinja2.TemplateError(message)


@contextlib.contextmanager
def limit_work(seconds: float, max_bytes: int) -> Iterator[None]:
    """Limit the processor time and additional memory of this process within the block.

    A library call is not interrupted. Memory is limited on Linux only. Outside the main thread
    nothing is limited.

    Raises:
        OutOfBounds: the time limit was exceeded.
        MemoryError: the memory limit was exceeded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _limit_memory(max_bytes):
        before = signal.signal(signal.SIGPROF, _interrupt)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise OutOfBounds


@contextlib.contextmanager
def _limit_memory(max_bytes: int) -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + max_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
