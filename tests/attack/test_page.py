"""The page of a job: sites, strangers and viewers that mean no good"""

import http.client
import socket
import time

import pytest

from midstep.cli.page import live, server

from ..contract.served_page import PATIENCE_S, TOKEN, Looks, ends, get, heard, serving, watching
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
        told = [get(port, "/login", "POST", "token=wrong")[0] for _ in range(server.MOST_TRIES + 1)]
        assert told == [403] * server.MOST_TRIES + [429]
        assert get(port, "/login", "POST", "token=open+sesame")[0] == 429


@attack(
    "a viewer opens the stream of events and does not read it",
    holds="nothing piles up: it is closed after 10 s, and the others hear on",
)
def test_a_reader_that_does_not_read_is_dropped_and_the_others_hear_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SLOW_S", 0.5)
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
    monkeypatch.setattr(server, "SILENT_S", 0.3)
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
