"""What the planner measured, kept across runs: one JSON file per (target, drafter, machine).

It helps but is never needed: a file that is missing, broken or of another version is logged
and ignored, and so is one that cannot be written.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.snapshot import EstimateSnapshot
from orchestrator.registry import Peer
from protocol.messages import Hello, Role
from protocol.process.files import remove_leftovers, write_atomically

_log = logging.getLogger(__name__)

_EVERY_S = 60.0


class EstimateStore:
    """The estimates for the current pair of models; without a folder they are not kept.

    Args:
        folder: where the files are; empty keeps nothing.
        machine: name of the chip and its cores, as measured times depend on them.
    """

    def __init__(self, folder: str, machine: str) -> None:
        self.cost_model = CostModel()
        self._folder = Path(folder) if folder else None
        self._machine = machine
        self._path: Path | None = None
        self._saved_at = 0.0

    def load_for(self, peers: Mapping[Role, Peer]) -> None:
        """Start from the file of the pair that these services are, if it is another pair."""
        verifier, drafter = peers.get("verifier"), peers.get("drafter")
        if verifier is not None:
            self.cost_model.expect_passes(verifier.hello.pass_times)
        if self._folder is None or verifier is None or drafter is None:
            return
        path = self._folder / f"{_fingerprint(verifier.hello, drafter.hello, self._machine)}.json"
        if path != self._path:
            self.save()
            self._path = path
            remove_leftovers(self._folder)
            saved = _read(path)
            # A clock that was set back does not make measurements of the future.
            age_s = max(0.0, time.time() - saved.saved_at) if saved is not None else 0.0
            self.cost_model.restart(saved, age_s)

    def save_if_due(self, now: float) -> None:
        """Save once a minute; `now` in seconds of a monotonic clock."""
        if self._path is not None and now - self._saved_at > _EVERY_S:
            self._saved_at = now
            self.save()

    def save(self) -> None:
        """Write what was measured for the current pair, as a whole or not at all."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            snapshot = msgspec.structs.replace(self.cost_model.save(), saved_at=time.time())
            write_atomically(self._path, msgspec.json.encode(snapshot))
        except OSError as error:
            _log.warning("cannot save what the planner measured to %s: %s", self._path, error)


def _read(path: Path) -> EstimateSnapshot | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EstimateSnapshot)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("ignored the planner's measurements in %s: %s", path, error)
        return None


def _fingerprint(verifier: Hello, drafter: Hello, machine: str) -> str:
    """A name for a pair on a machine: models, backends, compute units, chip and cores."""
    parts = [machine]
    for hello in (verifier, drafter):
        parts += [hello.backend, hello.compute_unit, hello.model, *_weights(Path(hello.model))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _weights(folder: Path) -> list[str]:
    """What tells two versions of a model folder apart; nothing if it is on another machine."""
    try:
        files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    except OSError:
        return []
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in files]
