"""The page at `/`, in a real browser without a window."""

import http.server
import json
import os
import re
import shutil
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.settings.settings import StackSettings
from tests.support.stack import DEADLINE_S, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="ssd-t-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SSD_RUN_DIR", folder)
        target = write_tiny_model(Path(folder) / "target", "llama", seed=1)
        draft = write_tiny_model(Path(folder) / "draft", "llama", seed=1)
        settings = StackSettings(model=str(target), draft_model=str(draft), http=True, port=0)
        with running(settings) as stack:
            assert stack.supervisor.listener is not None
            stack.warm_up()
            yield stack.supervisor.listener.url


def test_the_page_needs_nothing_else(url: str) -> None:
    """No address in it leads elsewhere, and the browser is forbidden to follow any."""
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:  # noqa: S310  # our own server
        source = response.read().decode()
        policy = response.headers["Content-Security-Policy"]
    assert not re.findall(r"(?:https?:)?//[a-z]+\.", source)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_a_chat_in_a_browser(url: str) -> None:
    """An answer appears with its tokens coloured, with figures, rounds and processes beside it."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # optional

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=list(FLAGS), timeout=1e3 * DEADLINE_S
        )
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.set_default_timeout(1e3 * DEADLINE_S)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        page.locator("#state", has_text="ok").wait_for()
        assert page.locator("#model").inner_text() == "target"
        page.fill("#max", "200")
        page.fill("#draft", "4")
        page.fill("#ask", "<b>hello</b>")
        page.click("#send")
        page.locator("#last", has_text="tok/s").wait_for()
        page.locator("#send").wait_for()
        assert page.locator(".turn.user").inner_text() == "<b>hello</b>"
        origins = page.eval_on_selector_all(".turn.assistant span", "s => s.map(x => x.className)")
        assert "target" in origins
        assert {"hit", "miss"} & set(origins)
        painted = page.evaluate(
            "() => { const c = document.getElementById('timeline');"
            " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            " return d.some((value, i) => i % 4 === 3 && value > 0); }"
        )
        assert painted
        assert page.locator("#stack tr").count() == 3
        page.locator("#recent", has_text="ssd").wait_for()
        shown = page.locator("#now").inner_text()
        assert all(word in shown for word in ("speed", "tok/s", "accepted", "hits", "planner"))
        assert not page.locator("#keybox").is_visible()
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=str(Path(folder) / "page.png"), full_page=True)
        page.set_viewport_size({"width": 390, "height": 800})
        overflow = page.evaluate("() => document.documentElement.scrollWidth > window.innerWidth")
        assert not overflow, json.dumps(complaints)
        if folder:
            page.screenshot(path=str(Path(folder) / "narrow.png"), full_page=True)
        _check_a_second_turn(page)
        browser.close()
    assert complaints == []


def _check_a_second_turn(page: Any) -> None:
    """A cut answer says so, a new line is typed with Shift, and a reload forgets nothing."""
    page.set_viewport_size({"width": 1100, "height": 800})
    page.fill("#max", "3")
    page.click("#systembox summary")
    page.fill("#system", "Be brief.")
    page.fill("#ask", "one")
    page.press("#ask", "Shift+Enter")
    page.type("#ask", "two")
    page.press("#ask", "Enter")
    page.locator(".turn.assistant").nth(1).locator(".cut", has_text="max tokens").wait_for()
    page.locator("#send").wait_for()
    assert page.locator(".turn.user").last.inner_text() == "one\ntwo"
    page.locator("#last", has_text="times plain").wait_for()
    assert page.locator("#last td[title]").count() > 4
    before = page.locator("#talk").inner_text()
    page.reload()
    page.locator("#state", has_text="ok").wait_for()
    assert page.locator("#talk").inner_text() == before
    assert (page.input_value("#max"), page.input_value("#system")) == ("3", "Be brief.")
    page.click("#reset")
    page.reload()
    page.locator("#state", has_text="ok").wait_for()
    assert page.locator("#talk").inner_text() == ""


STRANGE = """async (url) => {
    const body = JSON.stringify({messages: [{role: "user", content: "hello"}], max_tokens: 4});
    const chat = url + "/v1/chat/completions";
    const post = (kind) => fetch(chat, {method: "POST", headers: {"Content-Type": kind}, body});
    const ways = {
        json: () => post("application/json"),
        simple: () => post("text/plain"),
        blind: () => fetch(chat, {method: "POST", mode: "no-cors", body}),
        read: () => fetch(url + "/v1/models"),
    };
    const seen = {};
    for (const [name, way] of Object.entries(ways)) {
        try { const r = await way(); seen[name] = r.type + " " + r.status + (await r.text()); }
        catch (error) { seen[name] = error.name; }
    }
    return seen;
}"""
"""What a page tries, and what it gets to see of the answers."""


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_a_page_from_elsewhere_cannot_use_the_server(url: str) -> None:
    """Whatever it sends, nothing is generated, and it reads nothing."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # optional

    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other,
        sync_playwright() as playwright,
    ):
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            browser = playwright.chromium.launch(
                executable_path=BROWSER, args=list(FLAGS), timeout=1e3 * DEADLINE_S
            )
            page = browser.new_page()
            page.set_default_timeout(1e3 * DEADLINE_S)
            before = read_recent(url)
            page.goto(f"http://127.0.0.1:{other.server_port}/")
            seen = page.evaluate(STRANGE, url)
            after = read_recent(url)
            browser.close()
        finally:
            other.shutdown()
            thread.join()
    assert seen == {"json": "TypeError", "simple": "TypeError", "blind": "opaque 0",
                    "read": "TypeError"}  # fmt: skip
    assert after == before


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A page of another origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>elsewhere</title>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as its base has it
        """Nothing is written."""


def read_recent(url: str) -> str:
    """What the server has answered lately."""
    with urllib.request.urlopen(f"{url}/recent", timeout=DEADLINE_S) as response:  # noqa: S310
        text: str = response.read().decode()
    return text
