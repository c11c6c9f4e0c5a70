"""A job of roles on the page of all jobs, in a real browser: each role by itself, one that loses a rank, all again."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.incidents import JobStatus

from ..chaos.grouped import ROLES_PATIENCE_S, RolesJob, training_role
from ..chaos.jobs import ROOMY
from .test_page_in_chromium import DESK, PATIENCE_MS, Operator, browser, paged, picture, until
from .test_page_in_chromium import pytestmark as of_pages

pytestmark = of_pages
__all__ = ["browser"]

ENDLESS = 1_000_000
WAITS = "import time\nwhile True:\n    time.sleep(1.0)\n"


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolesJob]:
    """A job of a role that trains, and of one that knows nothing of midstep and has no ladder of its own."""
    home = tmp_path_factory.mktemp("roles")
    script = home / "waits.py"
    script.write_text(WAITS)
    job = RolesJob(
        home,
        {
            "actor": training_role(home / "records-actor", steps=ENDLESS, ladder=ROOMY["ladder"]),
            "rollout": {"script": str(script), "ranks": 1},
        },
    )
    try:
        job.role("actor").pids()
        job.role("rollout").until(_runs, "its process", ROLES_PATIENCE_S)
        yield job
    finally:
        job.close()


def of_role(page: Any, role: str) -> Any:
    """The line of a role in the list."""
    return page.locator(f"#jobs li[data-job='job/{role}']")


def test_each_role_is_in_the_list_opens_and_is_hurt_by_itself(browser: Any, roles: RolesJob) -> None:
    """The map has the ranks of the role alone, and its incident is none of the other role's."""
    actor = roles.role("actor")
    with paged("--all", role="operator", home=roles.root) as (_, address):
        context = browser.new_context(**DESK)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        until(page, "#jobs li[data-job='job/actor'][data-mood=training]", "nothing is asked of you")
        until(page, "#jobs li[data-job='job/rollout'][data-mood=starting]", "none has called midstep so far")
        until(page, "#headline", "2 jobs under way")
        picture(page, "roles")
        of_role(page, "actor").locator("a").click()
        until(page, "#headline", "Training, nothing is asked of you")
        until(page, "#world-words", "2 ranks: 2 training")
        before = actor.until(lambda told: told.phase == "running", "training")
        Operator(page, actor).press_at(before.ranks[1].node, "inject", 1, do="kill")
        page.wait_for_selector("#incident-1")
        page.locator("#incident-1 summary").click()
        assert "recover_in_place" in page.locator("#incident-1").inner_text()
        actor.until(lambda told: told.ranks[1].pid != before.ranks[1].pid and told.phase == "running", "a recovery")
        until(page, "#world-words", "2 training")
        picture(page, "role")
        page.locator("#all").click()
        of_role(page, "rollout").locator("a").click()
        until(page, "#world-words", "1 rank: 1 starting")
        until(page, "#incidents", "No incident has ended yet")
        context.close()


def test_a_page_of_a_role_shows_the_one_that_has_begun_again_with_all_others(browser: Any, roles: RolesJob) -> None:
    """A role without a ladder loses a rank: all begin again, in other directories. The page stays open meanwhile."""
    actor, rollout = roles.role("actor"), roles.role("rollout")
    with (
        paged("--all", role="operator", home=roles.root) as (_, address),
        paged(f"{roles.directory}/actor") as (_, alone),
    ):
        context = browser.new_context(**DESK)
        listed, of_all, of_one = context.new_page(), context.new_page(), context.new_page()
        for page, where in (
            (listed, address),
            (of_all, f"{address.partition('login')[0]}?job=job/actor"),
            (of_one, alone),
        ):
            page.set_default_timeout(PATIENCE_MS)
            page.goto(where)
        until(of_all, "#headline", "Training")
        until(of_one, "#headline", "Training")
        of_one.wait_for_selector("#incident-1")
        before = actor.pids()
        os.kill(rollout.until(_runs, "its process").ranks[0].pid, signal.SIGKILL)
        roles.wait_until(lambda: roles.group().of("actor").attempt == 2, "all roles to begin again")
        assert actor.pids() != before
        for page in (of_all, of_one):
            until(page, "#incidents", "No incident has ended yet")
            until(page, "#headline", "Training")
            until(page, "#world-words", "2 ranks: 2 training")
            page.wait_for_selector("#connection[data-live=yes]")
        until(listed, "#jobs li[data-job='job/actor'][data-mood=training]", "Training")
        context.close()
    assert Path(actor.directory).name == "actor.2"


def _runs(told: JobStatus) -> bool:
    return bool(told.ranks) and told.ranks[0].pid > 0
