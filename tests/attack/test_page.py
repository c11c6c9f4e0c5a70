"""The page of a job: sites, strangers and viewers that mean no good"""

import contextlib
import http.client
import socket
import time
from pathlib import Path

import pytest

from midstep.cli.bundle import SupportBundle
from midstep.cli.page import limits, live, server, sessions
from midstep.cli.page.jobs import MOST_OPEN, JobAccess, JobList, PagedJobs, named_job

from ..contract.served_page import (
    PATIENCE_S,
    ROLES,
    TOKEN,
    Asks,
    Browser,
    Looks,
    ends,
    get,
    heard,
    serving,
    serving_all,
    watching,
)
from .attack import attack


@attack(
    "paths that lead out of the folder of the page: `..`, and how else that can be written",
    holds="only files that were read at the start are answered with",
    reads="no such file",
)
def test_nothing_but_its_files_can_be_read() -> None:
    with serving(Looks()) as port:
        for path in (
            "/static/../server.py",
            "/static/..%2fserver.py",
            "/static/%2e%2e/server.py",
            "/static/",
            "/etc/passwd",
        ):
            assert get(port, path)[0] == 404


@attack(
    "a web site leads its name to this machine, so that a browser here reads the page for it",
    holds="a page without a token answers to the names of this machine only",
    reads="This page is served under another name.",
)
def test_a_site_that_leads_its_name_to_this_machine_is_refused() -> None:
    """A browser sends the name by which it came: that of another site is not answered."""
    with serving(Looks()) as port:
        assert get(port, "/", Host=f"evil.example:{port}")[0] == 421
        assert get(port, "/events", Host="evil.example")[0] == 421
        assert get(port, "/", Host=f"localhost:{port}")[0] == 200


@attack(
    "tokens are tried at the page, one after the other",
    holds="five wrong ones in a minute, from all places together; then none is looked at",
    reads="too many wrong tokens: wait a minute",
)
def test_tokens_cannot_be_tried_without_end() -> None:
    with serving(Looks(), TOKEN) as port:
        told = [get(port, "/login", "POST", "token=wrong")[0] for _ in range(sessions.MOST_TRIES + 1)]
        assert told == [403] * sessions.MOST_TRIES + [429]
        assert get(port, "/login", "POST", "token=open+sesame")[0] == 429


@attack(
    "a viewer opens the stream of events and does not read it",
    holds="nothing piles up: it is closed after 10 s, and the others hear on",
)
def test_a_reader_that_does_not_read_is_dropped_and_the_others_hear_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOW_S", 0.5)
    monkeypatch.setattr(live, "LOOK_S", 0.05)
    with serving(Looks(padding="x" * 1_000_000)) as port, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE_S)
        slow.connect(("127.0.0.1", port))
        slow.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with watching(port) as stream:
            for _ in range(40):
                heard(stream, "beat")
        time.sleep(1.0)
        assert ends(slow)


@attack(
    "a connection to the page asks for nothing",
    holds="it is closed after 10 s",
)
def test_a_connection_that_asks_for_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SILENT_S", 0.3)
    with serving(Looks()) as port, socket.create_connection(("127.0.0.1", port), PATIENCE_S) as silent:
        assert ends(silent)


@attack(
    "1,000 connections to the page at once",
    holds="those beyond 128 are closed, and the page is served afterwards",
)
def test_there_is_a_limit_of_connections() -> None:
    """A thousand that come at once are closed beyond the limit, and the page is served afterwards."""
    with serving(Looks()) as port:
        crowd = []
        try:
            for _ in range(1000):
                crowd.append(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        finally:
            for each in crowd:
                each.close()
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert get(port, "/")[0] == 200
                return
            except (ConnectionError, http.client.HTTPException):
                assert time.monotonic() < deadline_s
                time.sleep(0.1)


@attack(
    "another site in a browser with an operator's session presses a button of the page (CSRF)",
    holds="a press takes the page's own origin, and a proof that only its own script can read",
    reads="only the page itself presses its buttons: open it again",
)
def test_another_site_cannot_press_a_button() -> None:
    """With the session's cookie, from a form or a script, whatever it says of where it comes from."""
    asks = Asks()
    with serving(Looks(), others=ROLES, ask=asks) as port:
        browser = Browser(port, ROLES[0][1])
        forged: tuple[dict[str, str], ...] = (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": ""},
            {"Origin": f"http://127.0.0.1:{port + 1}"},
            {"Sec_Fetch_Site": "cross-site"},
            {"Sec_Fetch_Site": "same-site"},
            {"X_Midstep_Proof": ""},
            {"X_Midstep_Proof": "guess"},
        )
        assert [browser.press("save", None, **each)[0] for each in forged] == [403] * len(forged)
        assert browser.press("save", Content_Type="text/plain")[0] == 400
        assert get(port, "/press", Cookie=browser.cookie)[0] == 405
        assert asks.requests == []
        assert browser.press("save")[0] == 200


@attack(
    "a viewer, or somebody without a session, presses a button of the page",
    holds="the role is that of the session's token, and it is refused before the controller hears of it",
    reads="viewers have no buttons: log in with the token of another role",
)
def test_who_has_no_role_presses_nothing() -> None:
    asks = Asks()
    with serving(Looks(), TOKEN, others=ROLES, ask=asks) as port:
        viewer, operator = Browser(port, TOKEN), Browser(port, ROLES[0][1])
        assert viewer.told["buttons"] == []
        assert viewer.press("save")[0] == 403
        assert viewer.press("save", Cookie="")[0] == 401
        assert viewer.press("save", Cookie="midstep_page=guess")[0] == 401
        assert viewer.press("save", X_Midstep_Proof=operator.told["proof"])[0] == 403
        assert operator.press("promote", {"controller": "m1"})[0] == 403
    assert asks.requests == []


@attack(
    "a script with an operator's session presses buttons without end, or sends what is none",
    holds="20 in 10 s are looked at, from all sessions together; names, values and sizes are held against the button",
    reads="too many presses: wait some seconds",
)
def test_presses_are_bounded_and_held_against_the_button() -> None:
    asks = Asks()
    with serving(Looks(), others=ROLES, ask=asks) as port:
        browser = Browser(port, ROLES[0][1])
        wrong: tuple[tuple[str, dict[str, str]], ...] = (
            ("shutdown", {}),
            ("pause", {}),
            ("pause", {"for": "9999d"}),
            ("pause", {"for": "1h", "more": "x"}),
            ("forbid", {"rung": "stop", "for": "1h"}),
            ("restart", {"rank": "-1"}),
            ("restart", {"rank": "\u0663"}),
            ("drain", {"node": "x" * 257}),
            ("inject", {"rank": "1", "do": "drop_device"}),
        )
        assert [browser.press(name, values)[0] for name, values in wrong] == [400] * len(wrong)
        assert browser.press("save", {"a": "x" * server.MOST_PRESS_BYTES})[0] == 400
        assert asks.requests == []
        told = [browser.press("save")[0] for _ in range(sessions.MOST_PRESSES)]
        assert told.count(429) == len(wrong) + 1


@attack(
    "a viewer, or another site in an operator's browser, asks for a support bundle, or an operator for many",
    holds="it takes an operator's session and the page's own origin; one in 10 s, from all together",
    reads="that takes the role of an operator: log in with its token",
)
def test_a_bundle_is_for_operators_and_rarely() -> None:
    """It has the ends of logs, which are their owner's alone."""
    made: list[SupportBundle] = []

    def bundle() -> SupportBundle:
        made.append(SupportBundle("midstep-gpt.tar.gz", b"packed", ()))
        return made[-1]

    with serving(Looks(), TOKEN, others=ROLES, bundle=bundle) as port:
        viewer, operator = Browser(port, TOKEN), Browser(port, ROLES[0][1])
        assert (viewer.told["bundle"], operator.told["bundle"]) == (False, True)
        assert (get(port, "/bundle")[0], get(port, "/bundle", Cookie=viewer.cookie)[0]) == (401, 403)
        assert get(port, "/bundle", Cookie=operator.cookie, Sec_Fetch_Site="cross-site")[0] == 403
        assert made == []
        status, headers, body = get(port, "/bundle", Cookie=operator.cookie)
        assert (status, body) == (200, b"packed")
        assert headers["content-disposition"] == 'attachment; filename="midstep-gpt.tar.gz"'
        assert get(port, "/bundle", Cookie=operator.cookie)[0] == 429
        assert len(made) == 1


@attack(
    "a viewer reads the log of a rank, or an operator one that is none: `..`, a name, a number without end",
    holds="logs take an operator's session; a rank and a process are two small numbers, and no path",
    reads="that takes the role of an operator: log in with its token",
)
def test_logs_are_for_operators_and_of_ranks_only() -> None:
    asked: list[tuple[int, int]] = []

    def log(rank: int, life: int) -> str:
        asked.append((rank, life))
        return "said"

    with serving(Looks(), TOKEN, others=ROLES, log=log) as port:
        viewer, operator = Browser(port, TOKEN), Browser(port, ROLES[0][1])
        assert (viewer.told["log"], operator.told["log"]) == (False, True)
        assert get(port, "/log?rank=1&life=1")[0] == 401
        assert get(port, "/log?rank=1&life=1", Cookie=viewer.cookie)[0] == 403
        assert get(port, "/log?rank=1&life=1", Cookie=operator.cookie, Sec_Fetch_Site="cross-site")[0] == 403
        for wrong in ("", "-1", "..", "1.debug", "9" * 10, "%D9%A3"):
            assert get(port, f"/log?rank={wrong}&life=1", Cookie=operator.cookie)[0] == 400
        assert asked == []
        status, headers, body = get(port, "/log?rank=3&life=2", Cookie=operator.cookie)
        assert (status, body, asked) == (200, b"said", [(3, 2)])
        assert headers["content-type"].startswith("text/plain")
        assert get(port, "/what-if?rank=1")[0] == 401
        assert get(port, "/what-if?rank=x&node=..", Cookie=viewer.cookie)[0] == 404


@attack(
    "a browser asks a page of all jobs for one elsewhere: `../x`, an absolute path, `JOB/../x`, a link in their folder",
    holds="a job is a name in the list, and no path; at most 8 are open, and those that no browser watches make room",
    reads="there is no job 'x' here",
)
def test_a_page_of_all_jobs_leads_to_these_only(tmp_path: Path) -> None:
    found: list[str] = []

    def find(name: str) -> JobAccess:
        directory = named_job(name, tmp_path / "jobs").directory
        found.append(directory.name)
        return JobAccess(Looks())

    for number in range(12):
        (tmp_path / "jobs" / f"job{number}").mkdir(parents=True)
        (tmp_path / "jobs" / f"job{number}" / "journal.sqlite").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "journal.sqlite").touch()
    with serving_all(PagedJobs(None, find=find, listing=JobList(tmp_path / "jobs"))) as port:
        for name in ("", "..%2Felsewhere", str(tmp_path / "elsewhere"), "job1%2F..%2F..%2Felsewhere", "job", "a/b/c"):
            assert get(port, f"/node?name=&job={name}")[0] == 404
            assert get(port, f"/events?job={name}")[0] == 404
        assert found == []
        for number in range(12):
            assert get(port, f"/buttons?job=job{number}")[0] == 200
        assert len(found) == 12
        with contextlib.ExitStack() as watched:
            for number in range(MOST_OPEN):
                watched.enter_context(watching(port, job=f"job{number}"))
            assert get(port, "/buttons?job=job11")[0] == 404
