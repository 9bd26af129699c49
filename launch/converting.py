"""The converting process as the door sees it: started, listened to, ended."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator

import msgspec

from protocol.child import ERROR_PREFIX
from protocol.closing import Closing
from protocol.conversion import Converted, ConvertSettings, Event
from protocol.errors import BY_EXIT_CODE, RuntimeFailure
from protocol.settings import encode_settings

_END_S = 20.0


class Converting(Closing):
    """One run of `services.coreml`."""

    def __init__(self, settings: ConvertSettings) -> None:
        # A file, not a pipe: nobody reads along, and a full pipe would stop the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.coreml", encode_settings(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=(settings.lifeline,),
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )

    def events(self) -> Iterator[Event]:
        """What it says, until it ends; other libraries may write lines of their own."""
        for line in self._process.stdout or ():
            if line.startswith(b"{"):
                yield msgspec.json.decode(line, type=Event)

    def ended(self, converted: Converted | None) -> Converted:
        """Its last word; raises the error that it died of."""
        code = self._process.wait()
        if code == 0 and converted is not None:
            return converted
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        sentences = [line for line in lines if line.startswith(ERROR_PREFIX)]
        if sentences:
            kind = BY_EXIT_CODE.get(code, RuntimeFailure)
            raise kind(sentences[-1].removeprefix(ERROR_PREFIX))
        raise RuntimeFailure(f"the converting process ended with exit code {code}")

    def close(self) -> None:
        """End the process if it has not ended; it removes what is half-written."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
