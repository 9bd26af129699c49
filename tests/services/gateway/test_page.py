"""The page at `/`, in a real browser without a window."""

import json
import os
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

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
        browser.close()
    assert complaints == []
