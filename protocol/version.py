"""The name and version under which this is installed."""

DISTRIBUTION = "ssd-decode"
VERSION = "0.1.0"


_EXTRAS = {"coremltools": "coreml", "threadpoolctl": "coreml", "matplotlib": "report"}
"""Library -> the extra that brings it; answering needs none of them."""


def describe_missing(library: str) -> str:
    """Name the extra to install for a library that is missing; empty if none has it."""
    extra = _EXTRAS.get(library.partition(".")[0])
    return f"{library} is not installed: {install_hint(extra)}" if extra else ""


def install_hint(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
