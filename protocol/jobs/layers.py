"""Memory of a model's layers, for `ssd doctor` and `ssd models inspect`."""

import msgspec


class LayersReport(msgspec.Struct, frozen=True):
    """One line of JSON from `python -m services.tools.layers FOLDER`."""

    rewinding: str
    """The kinds of layers, and how they are likely to go back after a rejected draft."""
    misfit: str = ""
    """Why the weights are not those of the configuration, if they are not."""
