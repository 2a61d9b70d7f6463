"""The documentation site builds strictly and reads well in a browser: phone and desktop, light and dark."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("", "performance/", "performance/servers/", "performance/between_tokens/", "start/models/", "guide/pat/")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 800}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
# Of a screenshot in the colour scheme: mean brightness, 0 to 1. Figures keep a light card on a dark page.
BRIGHTNESS = {"light": (0.75, 1.0), "dark": (0.0, 0.5)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built so that a broken link, a page without a place or a missing docstring is an error."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (requirements/docs.txt)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browsers() -> Iterator[dict]:
    """A headless browser, by colour scheme."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements/docs.txt)")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser to look at the site with: install one of {', '.join(BROWSERS)}")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        # One for each scheme, which it remembers; what pages have in common is loaded once.
        yield {scheme: running.new_context(color_scheme=scheme) for scheme in BRIGHTNESS}
        running.close()


def test_the_site_builds_strictly(site: Path) -> None:
    """Each page of the navigation is there."""
    assert all((site / page / "index.html").is_file() for page in PAGES)


@pytest.mark.parametrize("scheme", BRIGHTNESS)
@pytest.mark.parametrize("name", PAGES, ids=lambda page: page.rstrip("/") or "index")
def test_a_page_in_a_browser(name: str, scheme: str, address: str, browsers) -> None:
    """It fits the width, shows its figures, asks no other host, and has the colours that the reader's system has."""
    from PIL import Image

    page = browsers[scheme].new_page()
    asked: list[str] = []
    failed: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(address + name, wait_until="networkidle")
    for screen in (DESKTOP, PHONE):
        page.set_viewport_size(screen)
        assert page.locator("h1").first.is_visible()
        assert page.evaluate("document.scrollingElement.scrollWidth") <= screen["width"]
        for image in page.locator("article img").all():  # those below the screen load when they are scrolled to
            image.scroll_into_view_if_needed()
            page.wait_for_function("image => image.complete", arg=image.element_handle())
            assert image.evaluate("image => image.naturalWidth") > 0
        page.evaluate("scrollTo(0, 0)")
        picture = Image.open(BytesIO(page.screenshot()))
        brightness = float(np.asarray(picture.convert("L")).mean() / 255)
        least, most = BRIGHTNESS[scheme]
        assert least <= brightness <= most, screen
    page.close()
    assert not failed
    assert all(url.startswith((address, "data:")) for url in asked)
