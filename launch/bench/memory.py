"""Peak memory of each process while something runs."""

import shutil
import subprocess
import threading

import psutil

_EVERY_S = 0.05
_TIMEOUT_S = 10.0


class MemoryWatch:
    """Samples the resident memory of processes in a thread, and their GPU memory on demand."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._peaks: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._smi = shutil.which("nvidia-smi")

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        for name, process in list(self._processes.items()):
            try:
                resident = process.memory_info().rss / 1e9
            except psutil.NoSuchProcess:
                del self._processes[name]  # it was restarted, and its successor is not watched
                continue
            self._peaks[name] = max(self._peaks.get(name, 0.0), resident)

    def peaks_gb(self) -> dict[str, float]:
        """Return the peak by name, and `name:gpu` if an NVIDIA driver reports it."""
        self._sample()
        names = {process.pid: name for name, process in self._processes.items()}
        for pid, used in self._on_gpus().items():
            if pid in names:
                key = f"{names[pid]}:gpu"
                self._peaks[key] = max(self._peaks.get(key, 0.0), used)
        return {name: round(peak, 3) for name, peak in self._peaks.items()}

    def _on_gpus(self) -> dict[int, float]:
        """Return GB by process id; MLX keeps memory once used, so this is nearly the peak."""
        if self._smi is None:
            return {}
        query = [self._smi, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S,
                                  check=False)  # fmt: skip
        except subprocess.TimeoutExpired:
            return {}
        used: dict[int, float] = {}
        for line in done.stdout.splitlines():
            pid, _, mebibytes = line.partition(",")
            if pid.strip().isdigit() and mebibytes.strip().isdigit():
                used[int(pid)] = used.get(int(pid), 0.0) + int(mebibytes) * 2**20 / 1e9
        return used
