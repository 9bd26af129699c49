"""A hub on loopback: enough of its HTTP for the real client to fetch a model from."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of one folder as the model `tests/tiny`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.status = 0
        """What everything is answered with instead; 0 for the truth."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Tests are quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, to: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = to.path.partition("?")[0]
        if self.status or not path.startswith(("/api/models/tests/tiny", "/tests/tiny")):
            reason = {403: "GatedRepo"}.get(self.status, "RepoNotFound")
            self._send(to, self.status or 404, b"{}", {"X-Error-Code": reason}, body=body)
        elif "/resolve/" in path:
            data = (self.folder / path.rpartition("/")[2]).read_bytes()
            if body:
                self.fetched.append(path.rpartition("/")[2])
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA}  # noqa: S324  # as the hub does
            self._send(to, 200, data, headers, body=body)
        else:
            files = [file for file in sorted(self.folder.iterdir()) if file.is_file()]
            listed: object = {
                "id": "tests/tiny",
                "sha": SHA,
                "siblings": [{"rfilename": file.name} for file in files],
            }
            if "/tree/" in path:
                listed = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": SHA}
                    for f in files
                ]
            self._send(to, 200, json.dumps(listed).encode(), {}, body=body)

    @staticmethod
    def _send(
        to: BaseHTTPRequestHandler, code: int, data: bytes, headers: dict[str, str], *, body: bool
    ) -> None:
        to.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            to.send_header(name, value)
        to.end_headers()
        if body:
            to.wfile.write(data)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A hub for the length of a block."""
    hub = Hub(folder)
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        thread.join()
        hub.server.server_close()
