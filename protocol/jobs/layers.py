"""Memory of a model's layers, for `ssd doctor` and `ssd models inspect`."""

import msgspec


class LayersReport(msgspec.Struct, frozen=True):
    """The output of `python -m services.tools.layers FOLDER`: one line of JSON."""

    rewinding: str
    """Kinds of layers, and how they are likely to roll back a rejected draft."""
    misfit: str = ""
    """Mismatch between the weights and the configuration, if any."""
