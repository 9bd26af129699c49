"""The stateless prefill function as a source of keys and values for another runtime's cache."""

from collections.abc import Generator
from pathlib import Path

import numpy as np

from protocol.errors import ModelError
from protocol.messages import Tokens
from protocol.settings import ComputeUnits
from services.coreml.convert.weights import fingerprint_of
from services.coreml.costs import empty_past, unit_of
from services.coreml.manifest import read_manifest
from services.coreml.model import ConvertedModel, chain_feed, open_model
from services.coreml.runtime.blob import Array

_FUNCTION = "prefill_kv"


class CoremlPrefill:
    """Compute prompts with a converted package."""

    def __init__(self, model: ConvertedModel) -> None:
        """Prefill with a converted model; raises ModelError if it lacks the function."""
        self._model = model
        self._chunk = model.manifest.function(_FUNCTION).tokens

    @property
    def compute_unit(self) -> str:
        """Device that computes prompts, if known."""
        return unit_of(self._model, _FUNCTION)

    @property
    def slots(self) -> int:
        """Longest prompt."""
        return self._model.slots

    def pieces(self, tokens: Tokens) -> Generator[tuple[Array, Array]]:
        """Yield chunk by chunk, each computed with the results of the previous ones as its past."""
        if not 0 < len(tokens) <= self.slots:
            raise ModelError(f"a prompt of {len(tokens)} tokens does not fit {self.slots} slots")
        past = empty_past(self._model)
        for start in range(0, len(tokens), self._chunk):
            feed = chain_feed(tokens[start : start + self._chunk], start, self.slots)
            stop = start + len(feed.tokens)
            new = self._model.keys_values(_FUNCTION, feed, past)
            if stop < len(tokens):
                for (keys, values), (new_keys, new_values) in zip(past, new, strict=True):
                    keys[:, :, start:stop] = new_keys
                    values[:, :, start:stop] = new_values
            keys_of, values_of = zip(*new, strict=True)
            yield np.concatenate(keys_of), np.concatenate(values_of)


def open_prefill(folder: Path, units: ComputeUnits, target: Path) -> CoremlPrefill:
    """Open the prefill function of a converted target.

    Raises:
        ModelError: `folder` was converted from another model than the present `target`.
    """
    if read_manifest(folder).source_fingerprint != fingerprint_of(target):
        raise ModelError(f"{str(folder)!r} is not a conversion of the target: convert it again")
    return CoremlPrefill(open_model(folder, units))
