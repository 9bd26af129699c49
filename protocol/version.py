"""The name and version under which this is installed."""

DISTRIBUTION = "ssd-decode"
VERSION = "0.1.0"


def install_hint(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
