"""The page at `/`: the stack's state, and a chat whose tokens show their origin."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse

_FOLDER = files("services.gateway") / "page"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


_SOURCE = re.sub(r"{{ ([a-z.]+) }}", lambda part: _read(part[1]), _read("page.html"))
"""The page with its style and scripts inlined."""


def render_page() -> HTMLResponse:
    """Return one self-contained document; its policy forbids the browser to load anything else."""
    return HTMLResponse(_SOURCE, headers={"Content-Security-Policy": _POLICY})


def _hash_of(element: str) -> str:
    """Return the hash that allows this inline script or style and no other."""
    [content] = re.findall(f"<{element}>(.*?)</{element}>", _SOURCE, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_POLICY = "; ".join(
    [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        f"script-src {_hash_of('script')}",
        f"style-src {_hash_of('style')}",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
