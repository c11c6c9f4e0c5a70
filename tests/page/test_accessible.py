"""The page for those who use no mouse, hear it instead of seeing it, or hold it in one hand. Of a played job.

The contrast of its colours is a matter of its CSS alone: `tests/unit/test_page_contrast.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from midstep.cli.page.jobs import JobAccess, PagedJobs
from midstep.cli.page.sections import Looked
from midstep.policies.schema import Policy
from midstep.protocol.incidents import NodeStatus, Outcome

from ..contract.served_page import ROLES, Asks, serving, serving_all
from ..unit.test_page_sentence import BEGAN_S, killed, status
from .test_page_in_chromium import PATIENCE_MS, browser, picture, until
from .test_page_in_chromium import pytestmark as of_pages

pytestmark = of_pages
__all__ = ["browser"]

NARROW: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2}
LONG = "a-name-of-a-node-that-somebody-has-made-much-longer-than-any-screen-of-a-phone-is-wide"
MOST_KEYS = 150
INCIDENTS = tuple(
    msgspec.structs.replace(
        killed(),
        number=number,
        began_s=BEGAN_S + 10.0 * number,
        outcome=Outcome.RESUMED,
        resumed_s=BEGAN_S + 10.0 * number + 2.0,
        resumed_step=41_000,
    )
    for number in (1, 2, 3)
)
LOOKED = Looked(
    status(
        incidents=INCIDENTS,
        nodes=(*status().nodes, NodeStatus(LONG, LONG, "isolated", (), 2, f"{LONG}: its fan is slow")),
    ),
    policy=f"# {LONG}\n" * 30,
    in_force=Policy(),
)
# What can be used: of a <details> the summary, and of the page not what a dialog holds that is closed.
CONTROLS = "a[href]:not(.skip), button, input, select, summary, canvas[tabindex], pre[tabindex]"
HERE = """() => {
  const each = document.activeElement;
  if (!each || each === document.body) return null;
  each.dataset.reached = "yes";
  return each.id || each.textContent.trim() || each.getAttribute("aria-label");
}"""
NOT_REACHED = f"""(part) => [...part.querySelectorAll("{CONTROLS}")]
  .filter((each) => each.checkVisibility() && !each.dataset.reached && !each.closest("dialog:not([open])"))
  .map((each) => each.outerHTML)"""
NAMELESS = f"""() => [...document.querySelectorAll("{CONTROLS}")]
  .filter((each) => each.checkVisibility())
  .filter((each) => ![each.textContent, each.getAttribute("aria-label"), each.getAttribute("aria-labelledby"),
    ...[...(each.labels || [])].map((label) => label.textContent)].some((name) => name && name.trim()))
  .filter((each) => each.tagName !== "PRE")
  .map((each) => each.outerHTML)"""


@contextmanager
def operated(browser: Any, options: dict[str, Any], looked: Looked = LOOKED) -> Iterator[Any]:
    """The page of a played job, with the buttons of an admin."""
    with serving(lambda: looked, others=ROLES, ask=Asks(), log=lambda rank, life: "said") as port:
        context = browser.new_context(**options)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"http://127.0.0.1:{port}/login#{ROLES[1][1]}")
        page.wait_for_selector("#job-buttons button")
        page.wait_for_selector("#map[data-ranks]")
        yield page
        context.close()


def tabbed_through(page: Any) -> list[str]:
    """Press Tab until it comes back to where it began; what had the focus, in order."""
    names = [name for name in (page.evaluate(HERE),) if name]
    for _ in range(MOST_KEYS):
        page.keyboard.press("Tab")
        name = page.evaluate(HERE)
        if name in names[:1]:
            break
        if name:  # else it is the browser itself
            names.append(name)
    return names


def not_reached(page: Any, inside: str = "body") -> list[str]:
    """What can be used and had no focus."""
    found: list[str] = page.locator(inside).evaluate(NOT_REACHED)
    return found


def test_each_control_and_each_incident_is_reached_and_used_by_keyboard(browser: Any) -> None:
    """In the order of the page; incidents open by Enter, a dialog has all of its own and gives the focus back."""
    with operated(browser, {"viewport": {"width": 1240, "height": 900}}) as page:
        page.evaluate("document.activeElement.blur()")
        names = tabbed_through(page)
        assert not_reached(page) == []
        assert page.evaluate(NAMELESS) == []
        assert (
            names.index("Pause") < names.index("map") < names.index("select") + 2 < names.index("Promote a controller")
        )
        for number in (3, 2, 1):
            page.locator(f"#incident-{number} summary").focus()
            page.keyboard.press("Enter")
            page.wait_for_selector(f"#incident-{number}[open]")
        assert "recover_in_place" in page.locator("#incident-1").inner_text()

        page.locator("[data-button=pause]").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#ask[open]")
        tabbed_through(page)
        assert not_reached(page, "#ask") == []
        page.keyboard.press("Escape")
        page.wait_for_selector("#ask:not([open])", state="attached")
        assert page.evaluate("document.activeElement.dataset.button") == "pause"

        page.locator("#map").focus()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        page.wait_for_selector("#node[open] [data-button=restart]")
        tabbed_through(page)
        assert not_reached(page, "#node") == []
        page.keyboard.press("Escape")
        page.wait_for_selector("#node:not([open])", state="attached")
        assert page.evaluate("document.activeElement.id") == "map"


def test_the_sentence_is_said_when_it_changes_and_only_then(browser: Any) -> None:
    """It is in a live region, in words; the figures, which change at each look, are in none."""
    now = [LOOKED]
    with serving(lambda: now[0]) as port:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"http://127.0.0.1:{port}/")
        until(page, "#headline", "Training, and asks you for")
        said = page.get_by_role("status").filter(has_text="Training, and asks you for")
        assert said.get_attribute("aria-live") == "polite"
        assert page.locator("#figures").evaluate("each => each.closest('[aria-live], [role=status]')") is None
        page.evaluate("""() => {
          window.said = [];
          new MutationObserver(() => window.said.push(document.getElementById("headline").textContent))
            .observe(document.getElementById("headline"), { childList: true, characterData: true, subtree: true });
        }""")
        told = LOOKED.status
        now[0] = msgspec.structs.replace(
            LOOKED, status=msgspec.structs.replace(told, committed=41_221, at_s=told.at_s + 1)
        )
        until(page, "#figures", "41,221")
        now[0] = Looked(status(phase="rejoining", incidents=(killed(),)))
        until(page, "#headline", "Recovering: rank 3, in place")
        assert page.evaluate("window.said") == ["Recovering: rank 3, in place"]
        assert page.get_by_role("application").get_attribute("aria-describedby") == "world-words"
        assert "4 ranks: 4 training" in page.locator("#world-words").inner_text()
        context.close()


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Any, colours: str) -> None:
    """At 360 pixels, with names longer than that: the page, what opens in it, and each dialog."""
    with operated(browser, {**NARROW, "color_scheme": colours}) as page:
        fits = "document.documentElement.scrollWidth <= innerWidth"
        assert page.evaluate(fits)
        page.locator("#incident-3 summary").click()
        page.locator("#policy-title + details summary").click()
        assert page.evaluate(fits)
        picture(page, f"narrow-{colours}")
        page.locator("[data-button=budget]").click()
        page.wait_for_selector("#ask[open]")
        assert page.evaluate(f"{fits} && document.getElementById('ask').scrollWidth <= innerWidth")
        page.keyboard.press("Escape")
        page.locator("#map").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        page.wait_for_selector("#node[open]")
        assert page.evaluate(f"{fits} && document.getElementById('node').scrollWidth <= innerWidth")
        page.keyboard.press("Escape")


def test_the_list_of_jobs_fits_a_phone_and_is_said(browser: Any) -> None:
    line = {"name": LONG, "mood": "asks", "headline": f"Asks you for {LONG}", "figures": "", "at_s": 0, "ended": False}
    jobs = PagedJobs(None, find=lambda name: JobAccess(lambda: LOOKED), listing=lambda: [line])
    with serving_all(jobs) as port:
        context = browser.new_context(**NARROW)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"http://127.0.0.1:{port}/")
        until(page, "#headline", "1 job of 1 asks something of you")
        assert page.locator("#headline").get_attribute("aria-live") == "polite"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#jobs a").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#map[data-ranks]")
        context.close()
