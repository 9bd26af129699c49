"""The distribution's name and version."""

DISTRIBUTION = "ssd-decode"
VERSION = "0.1.0"


_EXTRAS = {"coremltools": "coreml", "threadpoolctl": "coreml", "matplotlib": "report"}
"""Library -> the extra that installs it; answering requests needs none of them."""


def describe_missing(library: str) -> str:
    """Return the name of the extra for a missing library; empty if none has it."""
    extra = _EXTRAS.get(library.partition(".")[0])
    return f"{library} is not installed: {install_hint(extra)}" if extra else ""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
