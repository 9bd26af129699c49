"""From a head's folder to the backend that drafts with it."""

from pathlib import Path
from typing import Any

from protocol.errors import ModelError
from protocol.heads import HeadDescription, describe_head
from protocol.messages import FeatureRequest
from services.drafter.backends.base import DraftBackend
from services.drafter.backends.head.blocks import BlockBackend
from services.drafter.backends.head.dflash import BlockHead
from services.drafter.backends.head.eagle3 import Eagle3Head
from services.drafter.backends.head.mtp import MtpHead
from services.drafter.backends.head.recurrent import WINDOW, RecurrentBackend
from services.drafter.backends.head.weights import load_ends


def load_head(
    folder: Path, target: Path, prefill_step_size: int, unit: str = "", *, beside_target: bool
) -> DraftBackend:
    """Create the backend for the head in `folder`.

    Args:
        folder: as published.
        target: folder of the target, whose embedding and output head it shares.
        prefill_step_size: most rows of one pass over a prompt.
        unit: the compute unit, if known.
        beside_target: True if the verifier can read the head's files, and so project its states
            itself; else it sends them whole.

    Raises:
        ModelError: the folder holds no head, or one that does not fit the target.
    """
    head = describe_head(folder, target)
    if head is None:
        raise ModelError(f"{str(folder)!r} holds no head of a known format")
    ends = load_ends(target)
    kinds: dict[str, Any] = {"eagle3": Eagle3Head, "mtp": MtpHead}
    try:
        module: Any = kinds.get(head.format, BlockHead)(head, ends)
    # An unchecked config can raise any of these.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ModelError(f"config.json of the head {str(folder)!r} is wrong: {said}") from error
    if head.format in kinds:
        request = _request(head, module.normalization, beside_target=beside_target)
        return RecurrentBackend(
            head, ends, module, request, prefill_step_size=prefill_step_size, unit=unit
        )
    request = _request(head, "none", beside_target=beside_target)
    return BlockBackend(head, ends, module, request, prefill_step_size=prefill_step_size, unit=unit)


def _request(head: HeadDescription, normalization: Any, *, beside_target: bool) -> FeatureRequest:
    """Request states from the verifier, projected where it can read the projection."""
    file = head.files.get("fc.weight", "")
    norms = [name for name in head.tensors if name.startswith(("input_norm", "fc_norm"))]
    together = all(head.files[name] == file for name in norms)
    packed = "fc.scales" in head.tensors
    projects = beside_target and file and together and not packed and normalization != "final"
    # States that are not normalised can exceed half precision.
    whole = normalization == "none" and not projects
    return FeatureRequest(
        layers=head.layers,
        normalization=normalization,
        projection=file if projects else "",
        dtype="float32" if whole else "float16",
        window=WINDOW,
    )
