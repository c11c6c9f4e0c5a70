"""The page in a real browser, as a person looks at it, of a real job that loses a rank, of played ones in each state.

Screenshots lie in `out/page/` afterwards.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstep.cli.page.sections import Checkpoint, Looked
from midstep.controller.time_account import time_spent
from midstep.protocol.incidents import BudgetUse, JobStatus, NodeStatus, RankStatus
from midstep.protocol.time_spent import TimeCategory

from ..chaos.jobs import Job
from ..contract.served_page import serving
from ..unit.test_page_sentence import BEGAN_S, killed, status

CHROMIUM = shutil.which("chromium") or ""
pytestmark = [
    pytest.mark.page,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not CHROMIUM and "MIDSTEP_REQUIRE_CHROMIUM" not in os.environ,
        reason="there is no chromium: Debian's package chromium",
    ),
]

PATIENCE_MS = 120_000.0
PICTURES = Path(__file__).parents[2] / "out" / "page"
DESK: dict[str, Any] = {"viewport": {"width": 1240, "height": 900}}
DARK: dict[str, Any] = {**DESK, "color_scheme": "dark"}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
MANY = 10_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium."""
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, timeout=PATIENCE_MS, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(browser: Any, address: str, options: dict[str, Any]) -> Iterator[Any]:
    """Open the page, and hold it against what a browser complains of: errors, refused inline code, missing files."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.goto(address)
    page.wait_for_selector("#map[data-ranks]")
    yield page
    context.close()
    assert [each for each in complaints if "ERR_CONNECTION_REFUSED" not in each] == []


def until(page: Any, selector: str, text: str) -> None:
    """Wait until an element has a text. (A function to wait for would be evaluated, which the page forbids.)"""
    page.locator(selector).filter(has_text=text).wait_for()


def picture(page: Any, name: str, *, whole: bool = True) -> None:
    """Keep what is seen."""
    page.wait_for_timeout(300)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=whole)


def large(**changes: Any) -> JobStatus:
    """A job of 10,000 ranks: one node is lost, another one takes its place, some ranks are behind."""
    ranks = tuple(
        RankStatus(
            rank,
            f"node{rank // 8}" if rank // 8 != 700 else "spare1",
            100 + rank,
            2 if rank // 8 == 700 else 1,
            "rejoining" if rank // 8 in {699, 700} else "training",
            41_220 - (rank % 997 == 0),
            "computing",
        )
        for rank in range(MANY)
    )
    nodes = [NodeStatus(f"node{node}", "", "active", tuple(range(8 * node, 8 * node + 8))) for node in range(MANY // 8)]
    nodes[700] = NodeStatus("node700", "", "lost", ())
    nodes += [NodeStatus("spare1", "", "active", tuple(range(5600, 5608))), NodeStatus("spare2", "", "spare", ())]
    return status(ranks=ranks, nodes=tuple(nodes), ranks_asked=MANY, **changes)


@contextmanager
def paged(directory: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `midstep page`; yield the process and its address."""
    command = [sys.executable, "-m", "midstep.cli.main", "page", str(directory), "--listen", f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process, process.stdout.readline().split(" at ")[1].split()[0]
        process.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A real one that trains."""
    started = Job(tmp_path_factory.mktemp("job"), spares=1, steps=100_000, step_s=0.1)
    try:
        started.until(lambda told: told.phase == "running" and told.committed > 2, "its first steps")
        yield started
    finally:
        started.close()


def test_a_real_job_is_seen_through_an_incident(browser: Any, job: Job) -> None:
    """The sentence, the map, and an incident that opens to its cause and to why a rung was passed over."""
    with paged(job.directory) as (_, address), opened(browser, address, DESK) as page:
        until(page, "#headline", "Training")
        assert page.locator("#job").inner_text() == job.name
        assert "4 ranks: 4 training" in page.locator("#world-words").inner_text()
        picture(page, "training")
        job.rank_process(1).kill()
        page.wait_for_selector("#incident-1")
        page.locator("#incident-1 summary").click()
        told = page.locator("#incident-1").inner_text()
        assert "SIGKILL" in told
        assert "recover_in_place" in told
        assert "not retry_step" in told
        until(page, "#world-words", "4 training")
        assert "recover_in_place per job: 1 of" in page.locator("#budgets").inner_text()
        page.locator("#policy-title + details summary").click()
        assert "recover_in_place" in page.locator("#policy").inner_text()
        page.locator("#policy-title + details summary").click()
        picture(page, "incident")


def test_the_map_is_used_by_keyboard(browser: Any, job: Job) -> None:
    """Arrows move, what is chosen is said, Enter opens a node with the process ids of its ranks, Escape closes it."""
    with paged(job.directory) as (_, address), opened(browser, address, DARK) as page:
        until(page, "#headline", "Training")
        page.locator("#map").focus()
        page.keyboard.press("End")
        assert "spare" in page.locator("#pointed").inner_text()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        page.wait_for_selector("#node[open]")
        said = page.locator("#node").inner_text()
        known = job.status()
        assert known is not None
        there = known.nodes[0]
        assert there.node in said
        assert all(str(rank.pid) in said for rank in known.ranks if rank.node == there.node)
        picture(page, "node-dark", whole=False)
        page.keyboard.press("Escape")
        page.wait_for_selector("#node:not([open])", state="attached")


def test_a_connection_that_is_lost_is_found_again(browser: Any, job: Job) -> None:
    with paged(job.directory) as (process, address), opened(browser, address, DESK) as page:
        page.wait_for_selector("#connection[data-live=yes]")
        process.send_signal(signal.SIGINT)
        until(page, "#connection", "connection lost")
        process.wait(60)
        with paged(job.directory, int(address.rstrip("/").rpartition(":")[2])):
            page.wait_for_selector("#connection[data-live=yes]")


def test_ten_thousand_ranks_are_drawn_within_a_second(browser: Any) -> None:
    """And take less than 200 MB, whatever the colours show."""
    told = large()
    with serving(lambda: Looked(told)) as port, opened(browser, f"http://127.0.0.1:{port}/", DESK) as page:
        assert page.locator("#map").get_attribute("data-ranks") == str(MANY)
        for colour in ("behind", "life", "state"):
            page.locator(f"[data-colour={colour}]").click()
            page.wait_for_timeout(300)
            assert float(page.locator("#map").get_attribute("data-drawn-ms")) < 1000
            picture(page, f"ten-thousand-{colour}", whole=False)
        assert page.evaluate("performance.memory.usedJSHeapSize") < 200e6
        words = page.locator("#world-words").inner_text()
        assert words.startswith(
            "10,000 ranks: 9,984 training, 16 rejoining. 1,252 nodes: 1,250 active, 1 lost, 1 spare."
        )


STATES = {
    "recovering": Looked(status(phase="rejoining", incidents=(killed(),))),
    "asks": Looked(
        status(
            nodes=(
                NodeStatus("node0", "a", "active", (0, 1)),
                NodeStatus("node1", "b", "active", (2, 3)),
                NodeStatus("node2", "c", "isolated", (), 2, "fan 2 is slow"),
            ),
            budgets=(BudgetUse("recover_in_place per job", 28, 30), BudgetUse("recover per job", 3, 3)),
            time=time_spent(
                BEGAN_S, BEGAN_S + 7200.0, {TimeCategory.TRAINING: 7000.0, TimeCategory.QUIESCE: 200.0}, trained=True
            ),
        ),
        checkpoint=Checkpoint(41_000, BEGAN_S),
    ),
    "failed": Looked(
        status(phase="ended", exit_code=1, reason="budget recover per job is spent (3 of 3)"), "it has ended"
    ),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("look", "options"), [("light", DESK), ("dark", DARK), ("phone", PHONE)])
def test_each_state_is_seen_on_desk_and_phone(browser: Any, state: str, look: str, options: dict[str, Any]) -> None:
    """In both colours; nothing is wider than the screen."""
    with serving(lambda: STATES[state]) as port, opened(browser, f"http://127.0.0.1:{port}/", options) as page:
        assert page.locator("#top").get_attribute("data-mood") == state
        picture(page, f"{state}-{look}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_texts_of_users_are_shown_and_never_run(browser: Any) -> None:
    """Markup in names, reasons and last words is text."""
    evil = '<img src=x onerror="document.title=1">'
    incident = killed()
    report = msgspec.structs.replace(incident.reports[0], detail=evil, output=f"{evil}\n<script>1</script>")
    node = NodeStatus(evil, evil, "isolated", (), note=evil)
    told = status(
        job=evil, nodes=(*status().nodes, node), incidents=(msgspec.structs.replace(incident, reports=(report,)),)
    )
    with serving(lambda: Looked(told, policy=evil)) as port, opened(browser, f"http://127.0.0.1:{port}/", DESK) as page:
        page.locator("#map").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        page.wait_for_selector("#node[open]")
        assert page.locator("#node-title").inner_text() == evil
        assert evil in page.locator("#open").inner_text()
        assert page.locator("img").count() == 0
        assert page.locator("body script").count() == 0


def test_a_viewer_logs_in(browser: Any) -> None:
    """With a token the page is there only after it was typed."""
    with serving(lambda: STATES["recovering"], "open sesame") as port:
        context = browser.new_context(**PHONE)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#token").fill("guess")
        page.locator("button").click()
        page.wait_for_selector("[role=alert]")
        picture(page, "login")
        page.locator("#token").fill("open sesame")
        page.locator("button").click()
        page.wait_for_selector("#map[data-ranks]")
        assert page.locator("#headline").inner_text() == "Recovering: rank 3, in place"
        context.close()
