"""`midstep demo --page` in a real browser, from its first fault to its end: each of the four incidents is seen live."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .test_page_in_chromium import CHROMIUM, DESK, PATIENCE_MS, PICTURES
from .test_page_in_chromium import pytestmark as of_pages

DEMO_S = 900.0  # both of its jobs, on a busy machine
INCIDENTS = 4
pytestmark = [*(mark for mark in of_pages if mark.name != "timeout"), pytest.mark.timeout(DEMO_S + 60.0)]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def until_served(port: int, demo: "subprocess.Popen[bytes]") -> None:
    """Wait until the demo's second job has its page."""
    deadline_s = time.monotonic() + DEMO_S
    while True:
        assert demo.poll() is None, "the demo has ended without a page"
        assert time.monotonic() < deadline_s, "there is no page"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.2)
        else:
            return


class Watcher:
    """Looks at the page for as long as it is there, and notes how many incidents are on it and what it says."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self.counts: list[int] = []
        self.headlines: list[str] = []
        self.ended: dict[str, str] = {}

    def look(self) -> None:
        """Note what is seen now."""
        shown = self._page.locator("#incidents details.incident")
        count = shown.count()
        if count not in self.counts[-1:]:
            self.counts.append(count)
            self.ended = {
                str(each.get_attribute("id")): str(each.get_attribute("data-outcome")) for each in shown.all()
            }
            self._page.screenshot(path=PICTURES / f"demo-{count}.png", full_page=True)
        headline = self._page.locator("#headline").inner_text()
        if headline not in self.headlines[-1:]:
            self.headlines.append(headline)


def test_the_four_incidents_of_the_demo_are_seen_live_one_by_one(tmp_path: Path) -> None:
    """And the demo ends well, with both runs equal."""
    from playwright.sync_api import Error, sync_playwright

    PICTURES.mkdir(parents=True, exist_ok=True)
    port, said = free_port(), tmp_path / "said"
    with said.open("wb") as output, sync_playwright() as playwright:
        command = [sys.executable, "-m", "midstep.cli.main", "demo", "--page", f":{port}"]
        demo = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, timeout=PATIENCE_MS, args=["--no-sandbox"])
        try:
            until_served(port, demo)
            page = browser.new_context(**DESK).new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector("#map[data-ranks]")
            watcher = Watcher(page)
            while demo.poll() is None and len(watcher.ended) < INCIDENTS:
                watcher.look()
                page.wait_for_timeout(100)
        except Error as error:
            raise AssertionError(f"{error}: the demo said\n{said.read_text()}") from error
        finally:
            browser.close()
            if demo.poll() is None and sys.exc_info()[0] is not None:
                demo.terminate()
            code = demo.wait(DEMO_S)
    assert code == 0, said.read_text()
    assert watcher.counts == [0, 1, 2, 3, 4], "each was there while the next was still to come"
    assert watcher.ended == {f"incident-{number}": "resumed" for number in range(1, INCIDENTS + 1)}
    # A recovery takes less time than passes between two looks of the page: its headline is tested where time stands.
    assert any(each.startswith("Training") for each in watcher.headlines), watcher.headlines
    assert "the page is at" in said.read_text()
