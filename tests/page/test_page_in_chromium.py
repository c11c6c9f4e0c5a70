"""The page in a real browser, as a person looks at it, of a real job that loses a rank, of played ones in each state.

Screenshots lie in `out/page/` afterwards.
"""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.cli.page.sections import Checkpoint, Looked
from midstep.controller.time_account import time_spent
from midstep.policies.schema import Policy
from midstep.protocol.identities import Role
from midstep.protocol.incidents import BudgetUse, JobStatus, NodeStatus, RankStatus
from midstep.protocol.rank_logs import output_log
from midstep.protocol.time_spent import TimeCategory
from midstep.protocol.token import FullToken, parse_token

from ..chaos.jobs import Job
from ..chaos.joined import MIDSTEP, JoinedJob, write_token
from ..contract.served_page import ROLES, Asks, serving
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

PATIENCE_MS = 30_000.0
PICTURES = Path(__file__).parents[2] / "out" / "page"
BLOCK = 88  # pixels from a node of up to two ranks to the next one on the map
DESK: dict[str, Any] = {"viewport": {"width": 1240, "height": 900}}
DARK: dict[str, Any] = {**DESK, "color_scheme": "dark"}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 844}, "device_scale_factor": 2}
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
    refused = ("ERR_CONNECTION_REFUSED", "409 (Conflict)")  # by a server that is gone, by the controller
    assert [each for each in complaints if not any(word in each for word in refused)] == []


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
            slowness=0.0 if rank // 8 in {699, 700} else 1.7 if rank == 4321 else 1.0 + rank % 5 / 100,
        )
        for rank in range(MANY)
    )
    nodes = [NodeStatus(f"node{node}", "", "active", tuple(range(8 * node, 8 * node + 8))) for node in range(MANY // 8)]
    nodes[700] = NodeStatus("node700", "", "lost", ())
    nodes += [NodeStatus("spare1", "", "active", tuple(range(5600, 5608))), NodeStatus("spare2", "", "spare", ())]
    return status(ranks=ranks, nodes=tuple(nodes), ranks_asked=MANY, **changes)


@contextmanager
def paged(
    *job: Path | str, port: int = 0, role: str = "viewer", home: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `midstep page`; yield the process and its address, which is the one with a key where the role has buttons."""
    command = [sys.executable, "-m", "midstep.cli.main", "page", *map(str, job), "--listen", f":{port}", "--role", role]
    environment = dict(os.environ) if home is None else {**os.environ, "MIDSTEP_HOME": str(home)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            address = process.stdout.readline().split(" at ")[1].split()[0]
            yield process, address if role == "viewer" else process.stdout.readline().split(": ")[1].strip()
        finally:
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
        until(page, "#graphs", "loss")
        page.locator("#graphs polyline").wait_for(state="attached")
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


def test_all_jobs_are_in_one_list_and_each_opens(browser: Any, job: Job) -> None:
    """One that trains, one that has ended, those of a job of roles; back to the list, and on a phone."""
    home = job.directory.parent
    with paged("--all", role="operator", home=home) as (_, address):
        context = browser.new_context(**PHONE)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        until(page, "#jobs li[data-mood=training]", "Training")
        until(page, "#headline", "1 job under way")
        picture(page, "all-jobs-phone")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#jobs a", has_text=job.directory.name).click()
        page.wait_for_selector("#map[data-ranks]")
        until(page, "#headline", "Training")
        page.wait_for_selector("#job-buttons button")
        page.locator("#all").click()
        until(page, "#jobs", job.directory.name)
        context.close()


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
        with paged(job.directory, port=int(address.rstrip("/").rpartition(":")[2])):
            page.wait_for_selector("#connection[data-live=yes]")


def test_ten_thousand_ranks_are_drawn_within_a_second(browser: Any) -> None:
    """And take less than 200 MB, whatever the colours show."""
    told = large()
    with serving(lambda: Looked(told)) as port, opened(browser, f"http://127.0.0.1:{port}/", DESK) as page:
        assert page.locator("#map").get_attribute("data-ranks") == str(MANY)
        for colour in ("behind", "slow", "life", "state"):
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
    "recovering": Looked(
        status(
            phase="rejoining",
            incidents=(killed(),),
            ranks=tuple(
                msgspec.structs.replace(rank, state="rejoining" if rank.rank == 3 else "quiesced")
                for rank in status().ranks
            ),
            time=time_spent(
                BEGAN_S - 7100.0,
                BEGAN_S + 100.0,
                {TimeCategory.TRAINING: 7170.0, TimeCategory.START: 30.0},
                trained=True,
            ),
        )
    ),
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


# --- buttons ----------------------------------------------------------------------------------------------------------


class Operator:
    """A person at the page of a job who presses its buttons."""

    def __init__(self, page: Any, job: Job | JoinedJob) -> None:
        self._page, self._job = page, job
        page.wait_for_selector("#job-buttons button")

    def press(self, button: str, why: str = "as a test", **fields: str) -> None:
        """Press a button of the job, the ladder or the controllers, confirm it, and wait for what is said."""
        self._confirm(self._page.locator(f"[data-button={button}]").first, why, fields)

    def press_at(self, node: str, button: str, rank: int | None = None, **fields: str) -> None:
        """Press a button of a node, or of a rank on it."""
        self.open(node)
        about = f"node {node}" if rank is None else f"rank {rank}"
        self._confirm(self._page.locator(f"#node [data-button={button}][aria-label$='{about}']"), "as a test", fields)

    def open(self, node: str) -> None:
        """Open a node, by the keyboard."""
        known = self._job.status()
        assert known is not None
        self._page.locator("#map").focus()
        self._page.keyboard.press("Home")
        for _ in range([each.node for each in known.nodes].index(node)):
            self._page.keyboard.press("ArrowRight")
        self._page.keyboard.press("Enter")
        self._page.wait_for_selector("#node[open]")

    def _confirm(self, button: Any, why: str, fields: dict[str, str]) -> None:
        button.click()
        self._page.wait_for_selector("#ask[open]")
        assert self._page.locator("#ask-says").inner_text()
        for name, value in fields.items():
            field = self._page.locator(f"#field-{name}")
            if field.evaluate("each => each.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        self._page.locator("#ask-by").fill("ann")
        self._page.locator("#ask-why").fill(why)
        self._page.keyboard.press("Enter")
        self._page.wait_for_selector("#ask:not([open])", state="attached")


def asked_for(job: Job) -> list[str]:
    """What operators have asked of a job, from its journal."""
    known = job.status()
    assert known is not None
    assert all(each.asked.by == "ann, admin of the page" for each in known.controls.records)
    return [each.what for each in known.controls.records]


def states(told: JobStatus) -> dict[str, str]:
    """Return the state of each node."""
    return {node.node: node.state for node in told.nodes}


def test_what_is_pressed_happens_to_the_job_and_is_told(browser: Any, job: Job) -> None:
    """A pause and its end, a checkpoint, rungs, the failover, an acknowledgement: each by a click and a reason."""
    with paged(job.directory, role="admin") as (_, address), opened(browser, address, DESK) as page:
        person = Operator(page, job)
        page.locator("[data-button=pause]").click()
        picture(page, "confirm", whole=False)
        page.locator("#ask-cancel").click()
        person.press("pause", why="<b>the file server</b>", **{"for": "10m"})
        job.until(lambda told: told.held, "the pause")
        until(page, "#headline", "Paused for ann, admin of the page (owner): <b>the file server</b>")
        page.wait_for_selector("[data-button=pause]", state="hidden")
        picture(page, "paused")
        person.press("resume")
        job.until(lambda told: not told.held and told.phase == "running", "its end")
        person.press("save")
        job.until(lambda told: "was written" in told.controls.records[-1].outcome, "the checkpoint")
        person.press("forbid", rung="recover_in_place", **{"for": "2h"})
        job.until(lambda told: [each.rung for each in told.controls.rungs] == ["recover_in_place"], "it is forbidden")
        until(page, "#standing", "recover_in_place is not taken for")
        person.press("budget", rung="reschedule_pod", scope="job", limit="6")
        until(page, "#budgets", "reschedule_pod per job: 0 of 6")
        person.press("force", rung="recover", **{"for": "2h"})
        person.press("allow")
        job.until(lambda told: not told.controls.rungs, "all are allowed")
        person.press("pause-failover", **{"for": "10m"})
        job.until(lambda told: told.failover_paused_until_s > 0, "the failover is paused")
        person.press("end-failover-pause")
        job.until(lambda told: told.failover_paused_until_s == 0, "its end")
        person.press("acknowledge", why="the node is with the vendor")
        until(page, "#records", "acknowledge, because the node is with the vendor")
        picture(page, "operators")
    assert asked_for(job) == [
        "pause for up to 600 s",
        "train on",
        "save now",
        "forbid recover_in_place for 7200 s",
        "change the policy: ladder.reschedule_pod.budget.per_job: 5 -> 6",
        "begin at recover for 7200 s",
        "allow all rungs",
        "let no standby take over for 600 s",
        "let standbys take over again",
        "acknowledge",
    ]


def test_nodes_and_ranks_are_left_released_restarted_and_hurt_by_a_click(browser: Any, job: Job) -> None:
    """In the dialog of a node."""
    with paged(job.directory, role="operator") as (_, address), opened(browser, address, DESK) as page:
        person = Operator(page, job)
        before = job.until(lambda told: told.phase == "running", "training")
        place, life = before.ranks[2].node, before.ranks[2].incarnation
        person.press_at(place, "restart", 2)
        job.until(lambda told: told.ranks[2].incarnation == life + 1 and told.phase == "running", "another process")
        person.press_at(place, "inject", 2, do="kill")
        job.until(lambda told: told.ranks[2].incarnation == life + 2 and told.phase == "running", "one more")
        person.press_at(place, "drain")
        job.until(lambda told: told.ranks[2].node != place and told.phase == "running", "the drain")
        person.press_at(place, "release")
        job.until(lambda told: states(told)[place] == "spare", "the release")
        other = before.ranks[0].node
        person.press_at(other, "isolate")
        job.until(lambda told: told.ranks[0].node != other and told.phase == "running", "the other node is left")
        person.open(place)
        picture(page, "node-buttons", whole=False)
        page.keyboard.press("Escape")
        assert page.locator("[data-button=promote]").count() == 0


def test_a_policy_that_allows_no_faults_on_purpose_leaves_that_button_out(browser: Any) -> None:
    """And a press that comes all the same is for the controller to refuse."""
    looked = Looked(status(), in_force=Policy(allow_inject=False))
    with serving(lambda: looked, others=ROLES, ask=Asks()) as port:
        context = browser.new_context(**DESK)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"http://127.0.0.1:{port}/login#{ROLES[0][1]}")
        page.wait_for_selector("#job-buttons button")
        until(page, "#headline", "Training")
        page.locator("#map").focus()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        page.wait_for_selector("#node[open] [data-button=restart]", state="visible")
        assert page.locator("#node [data-button=inject]").count() == 2
        assert page.locator("#node [data-button=inject]:visible").count() == 0
        context.close()


HELD_AT, KILLED_AT = 5, 40


def test_the_page_of_a_job_elsewhere_is_as_that_of_one_here(browser: Any, tmp_path: Path) -> None:
    """With nothing of the job where the page is, and the token of an operator: seen, hurt by a click, and recovered.

    The token of a viewer gives nobody more than that.
    """
    job, home = JoinedJob(tmp_path, ranks_per_node=1), tmp_path / "nothing"
    try:
        for step in (HELD_AT, KILLED_AT):
            job.gate(step).touch()
        for name in ("a", "b"):
            job.start("--node", name)
        job.held_at(HELD_AT)
        whole = parse_token(job.token.read_text(), "its file")
        assert isinstance(whole, FullToken)
        for role in (Role.VIEWER, Role.OPERATOR):
            write_token(tmp_path / role, whole.for_role(job.name, role))
        where = (job.name, "--controller", job.endpoint, "--token-file")
        command = (*MIDSTEP, "page", *where, str(tmp_path / Role.VIEWER), "--listen", ":0", "--role", "operator")
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
        assert refused.returncode != 0
        assert "nobody can be operator on it" in " ".join(refused.stderr.split())

        with (
            paged(*where, str(tmp_path / Role.OPERATOR), role="operator", home=home) as (_, address),
            opened(browser, address, DESK) as page,
        ):
            until(page, "#headline", "Training")
            assert page.locator("#job").inner_text() == job.name
            page.locator("#policy-title + details summary").click()
            until(page, "#policy", "allow_inject: true")
            page.locator("#policy-title + details summary").click()
            person = Operator(page, job)
            person.press("acknowledge", why="seen from afar")
            until(page, "#records", "seen from afar")
            job.gate(HELD_AT).unlink()
            job.held_at(KILLED_AT)
            known = job.status()
            assert known is not None
            person.press_at(known.ranks[1].node, "inject", 1, do="kill")
            page.wait_for_selector("#incident-1")
            page.locator("#incident-1 summary").click()
            assert "recover_in_place" in page.locator("#incident-1").inner_text()
            picture(page, "elsewhere")
        job.gate(KILLED_AT).unlink()
        assert [job.wait(number) for number in range(2)] == [0, 0], job.said()
        (record, _) = job.report()["controls"]
        assert (record["asked"]["by"], record["asked"]["role"]) == ("ann, operator of the page", "operator")
    finally:
        job.close()


def test_the_log_of_a_rank_is_read_live_and_that_of_its_process_before(browser: Any, job: Job) -> None:
    """What ended processes said last is there, too; a viewer is offered neither."""
    with paged(job.directory, role="operator") as (_, address), opened(browser, address, DESK) as page:
        person = Operator(page, job)
        before = job.until(lambda told: told.phase == "running", "training")
        place, life = before.ranks[0].node, before.ranks[0].incarnation
        output_log(str(job.directory), 0, life).write_text("the present one <b>said</b> this\n")
        person.open(place)
        page.locator("#node [data-log='0']").click()
        until(page, "#log-text", "the present one <b>said</b> this")
        with output_log(str(job.directory), 0, life).open("a") as log:
            log.write("and then that\n")
        until(page, "#log-text", "and then that")
        picture(page, "log", whole=False)
        if life > 1:
            output_log(str(job.directory), 0, life - 1).write_text("its last words\n")
            page.locator("#log-earlier").click()
            until(page, "#log-text", "its last words")
            until(page, "#log-title", "which has ended")


def test_what_if_says_what_the_selected_nodes_and_ranks_would_cost(browser: Any, job: Job) -> None:
    """By the policy in force; nothing is done to the job. For viewers, by mouse and by keyboard."""
    known = job.until(lambda told: told.phase == "running", "training")
    with paged(job.directory) as (_, address), opened(browser, address, DESK) as page:
        until(page, "#headline", "Training")
        page.locator("#select").click()
        until(page, "#supposed", "Select ranks")
        place = [node.node for node in known.nodes].index(known.ranks[0].node)  # others may have been left
        page.locator("#map").click(position={"x": 12 + BLOCK * place, "y": 12})
        until(page, "#supposed", "What if: the process of rank 0")
        until(page, "#supposed", "recover_in_place: ")
        page.locator("#map").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        until(page, "#supposed", f"What if: node {known.nodes[-1].node} lost and the process of rank")
        picture(page, "what-if")
        page.locator("#select").click()
        page.wait_for_selector("#supposed", state="hidden")
    now = job.status()
    assert now is not None
    assert len(now.incidents) == len(known.incidents)


def test_a_viewer_has_no_buttons_and_sees_what_another_one_presses(browser: Any, job: Job) -> None:
    """Two at once: what the operator does is told to both. On a phone nothing is wider than the screen."""
    with (
        paged(job.directory, role="operator") as (_, address),
        opened(browser, address, PHONE) as page,
        opened(browser, address.partition("login")[0], DESK) as viewers,
    ):
        Operator(page, job).press("acknowledge", why="seen on the train")
        until(viewers, "#records", "seen on the train")
        assert viewers.locator("[data-button]").count() == 0
        assert viewers.locator("#bundle").is_hidden()
        assert viewers.locator("#login").is_visible()
        page.locator("[data-button=stop]").click()
        picture(page, "confirm-phone", whole=False)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.keyboard.press("Escape")
        page.wait_for_selector("#ask:not([open])", state="attached")


def test_an_operator_downloads_a_support_bundle(browser: Any, job: Job) -> None:
    with paged(job.directory, role="operator") as (_, address), opened(browser, address, DESK) as page:
        page.wait_for_selector("#bundle", state="visible")
        with page.expect_download() as begun:
            page.locator("#bundle").click()
        kept = PICTURES / "bundle.tar.gz"
        begun.value.save_as(kept)
        with tarfile.open(kept) as tar:
            names = {name.partition("/")[2] for name in tar.getnames()}
        assert begun.value.suggested_filename.endswith(".tar.gz")
        assert {"about.json", "status.json", "story.txt", "policy.yaml", "logs/controller.log"} <= names


@contextmanager
def standing_by(job: Job, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a controller of the job that stands by."""
    command = [sys.executable, "-m", "midstep.cli.main", "controller", "--standby", "--name", name]
    command += ["--job-dir", str(job.directory), "--run-dir", str(job.run_directory)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_controller_that_stands_by_is_promoted_by_a_click_and_the_page_goes_with_it(browser: Any, job: Job) -> None:
    """Then that one is killed while the page is open: the next one is shown, and takes what is pressed."""
    before = job.until(lambda told: told.phase == "running", "training")
    with (
        standing_by(job, "m1") as controller,
        paged(job.directory, role="admin") as (_, address),
        opened(browser, address, DESK) as page,
    ):
        person = Operator(page, job)
        until(page, "#controllers li", "m1")
        person.press("promote", why="its machine is serviced", controller="m1")
        job.until(lambda told: told.term > before.term, "the promotion")
        leads = page.locator("#controllers li").filter(has_text="m1").filter(has_text="leads")
        leads.wait_for()
        until(page, "#records", "let controller m1 lead, because its machine is serviced")
        picture(page, "promoted")
        term = before.term + 1
        controller.kill()
        job.until(lambda told: told.term > term, "the next controller")
        leads.wait_for(state="detached")
        page.wait_for_selector("#connection[data-live=yes]")
        until(page, "#headline", "Training")
        person.press("acknowledge", why="the next one leads")
        until(page, "#records", "the next one leads")
        until(page, "#graphs", "loss")


def test_the_policy_in_force_is_shown_as_it_is_changed(browser: Any, job: Job) -> None:
    with paged(job.directory) as (_, address), opened(browser, address, DESK) as page:
        page.locator("#policy-title + details summary").click()
        until(page, "#policy", "per_job: 10\n")
        words = ["policy", "set", str(job.directory), "ladder.recover.budget.per_job=21", "--why", "as a test", "--yes"]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        until(page, "#policy", "per_job: 21\n")
        now = job.status()
        assert now is not None
        used = next(each.used for each in now.budgets if each.name == "recover per job")
        until(page, "#budgets", f"recover per job: {used} of 21")


def test_what_is_refused_is_said_in_the_dialog(browser: Any, job: Job) -> None:
    with paged(job.directory, role="admin") as (_, address), opened(browser, address, DARK) as page:
        page.locator("[data-button=promote]").click()
        page.locator("#field-controller").fill("nobody")
        page.locator("#ask-by").fill("ann")
        page.locator("#ask-why").fill("to see it refused")
        page.locator("#ask-do").click()
        until(page, "#ask-wrong", "there is no controller 'nobody'")
        picture(page, "refused-dark", whole=False)
        page.locator("#ask-cancel").click()


def test_a_job_is_stopped_by_a_click(browser: Any, job: Job) -> None:
    """With a checkpoint, and the reason in its record. The last test of this job."""
    with paged(job.directory, role="operator") as (_, address), opened(browser, address, DESK) as page:
        Operator(page, job).press("stop", why="enough")
        until(page, "#headline", "enough (ann, operator of the page)")
        page.wait_for_selector("[data-button=pause]", state="hidden")
    job.launcher.wait(60)
