"""The demo says how it is seen in a browser, and `--page` needs no address for it."""

from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli import demo
from midstep.cli.main import main
from midstep.cli.page.beside import ANY_PORT


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Where the demo was to have its page; nothing is trained."""
    places: list[str | None] = []

    def perform(*_: Any, page: str | None = None) -> list[str]:
        places.append(page)
        return []

    monkeypatch.setattr(demo, "perform", perform)
    return places


def test_a_demo_without_a_page_ends_by_saying_how_to_open_one(pages: list[str | None]) -> None:
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("to see it live in a browser, with buttons: ")
    assert "midstep demo --page" in done.output.splitlines()[-1]
    assert pages == [None]


def test_a_page_without_an_address_is_on_this_machine_at_a_free_port(pages: list[str | None]) -> None:
    assert CliRunner().invoke(main, ["demo", "--page"]).exit_code == 0
    assert CliRunner().invoke(main, ["demo", "--page", ":9410"]).exit_code == 0
    assert pages == [ANY_PORT, ":9410"]
