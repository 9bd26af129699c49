"""The distilling process as the door sees it: started, listened to, asked to save and stop."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import msgspec

from protocol.child import ERROR_PREFIX
from protocol.closing import Closing
from protocol.distillation import Event, Finished
from protocol.errors import BY_EXIT_CODE, RuntimeFailure
from protocol.settings import DistillSettings, encode_settings


class Distilling(Closing):
    """One run of `services.distill`."""

    def __init__(self, settings: DistillSettings) -> None:
        # A file, not a pipe: nobody reads along, and a full pipe would stop the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.distill", encode_settings(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=(settings.lifeline,),
            start_new_session=True,  # Ctrl-C is for us, who then ask it to save
        )

    def events(self) -> Iterator[Event]:
        """What it says, until it ends."""
        for line in self._process.stdout or ():
            # An interrupted read may have swallowed the start of a line.
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=Event)

    def ask_to_stop(self) -> None:
        """Let it save its state and end."""
        self._process.terminate()

    def ended(self, finished: Finished | None) -> Finished:
        """Its last word; raises the error it died of if there was none."""
        code = self._process.wait()
        if code == 0 and finished is not None:
            return finished
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        sentences = [line for line in lines if line.startswith(ERROR_PREFIX)]
        if sentences:
            kind = BY_EXIT_CODE.get(code, RuntimeFailure)
            raise kind(sentences[-1].removeprefix(ERROR_PREFIX))
        raise RuntimeFailure(f"the distilling process ended with exit code {code}")

    def close(self) -> None:
        """End the process if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
