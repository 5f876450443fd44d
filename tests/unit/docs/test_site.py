"""The site of the documents: it builds without a warning, no link is dead, and a browser finds its way."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import dtrain
from tests.helpers.launch import ROOT

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]
SITE = ROOT / "build/site"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "zensical", "build", "-f", ".zensical.toml", "--strict", "--clean"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves ``folder`` on the loopback interface; yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def test_no_link_is_dead(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.glob("**/index.html")}
    assert len(pages) > 100
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    dead = []
    for page, text in pages.items():
        for target in set(re.findall(r'(?:href|src)="([^"]+)"', text)):
            path, _, anchor = unquote(target).partition("#")
            if re.match(r"[a-z]+:", target):
                assert target.startswith(("https://", "mailto:", "data:")), target
                continue
            linked = (page.parent / path.split("?")[0]).resolve() if path else page
            linked = linked / "index.html" if linked.is_dir() else linked
            if not linked.is_relative_to(site) or not linked.exists() or (anchor and anchor not in ids[linked]):
                dead.append(f"{page.parent.relative_to(site)}: {target}")
    assert not dead, "\n".join(dead)


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "reference/api/index.html").read_text(encoding="utf-8")
    missing = [name for name in dtrain.__all__ if f'id="dtrain.{name}"' not in text]
    assert not missing
    assert not re.search(r":(?:meth|mod|class|func|attr|data):", text)


def test_a_browser_opens_it(site: Path, tmp_path: Path) -> None:
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    api = pytest.importorskip("playwright.sync_api", reason="the extra docs is not installed")
    said: list[str] = []
    with served(site) as url, api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        # not Chromium's own remarks, such as that a fragment in the address keeps a field from its focus
        page.on("console", lambda message: message.type in ("error", "warning") and said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or said.append(request.url))
        page.goto(url)
        assert page.locator("h1").inner_text().startswith("dtrain")
        field = page.get_by_placeholder("Search")
        found = page.locator("a[href*='/precision/precision/']", has_text="Loss scaling").first
        for _ in range(10):  # keys before the script runs, and words before the index is loaded, can be lost
            if not field.is_visible():
                page.keyboard.press("Control+k")
            with suppress(api.TimeoutError):
                field.fill("", timeout=10_000)
                field.type("loss scale")
                found.click(timeout=10_000)
                break
        page.wait_for_url("**/precision/**")
        for path in ("", "start/library/", "reference/keys/", "scale/planning/"):
            page.set_viewport_size({"width": 390, "height": 844})  # a phone
            page.goto(url + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        browser.close()
    assert not said, "\n".join(said)
