"""The page is served to those who may see it, and costs one look, however many watch."""

import http.client
import json
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

import midstep.cli.page
from midstep.cli.main import main
from midstep.cli.page import live, server
from midstep.controller.endpoints.control_requests import ControlRequest, LeaveNodeRequest, Refused, Reply, Request
from midstep.protocol import controls as c
from midstep.protocol.errors import MidstepError

from .served_page import PATIENCE_S, ROLES, TOKEN, Asks, Browser, Looks, get, heard, serving, watching


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def port(looks: Looks) -> Iterator[int]:
    with serving(looks) as port:
        yield port


def test_a_viewer_hears_all_parts_and_then_what_changes(port: int) -> None:
    with watching(port) as stream:
        assert heard(stream, "head")["job"] == "gpt"
        assert heard(stream, "world")["asked"] == 1
        first = heard(stream, "beat")["top"]
        assert heard(stream, "beat")["top"] != first


def test_however_many_watch_it_is_looked_once_a_second_and_never_while_nobody_does(looks: Looks, port: int) -> None:
    time.sleep(1.5)
    assert looks.times == 0
    with watching(port) as one, watching(port) as other, watching(port) as third:
        began_s = time.monotonic()
        before = looks.times
        for stream in (one, other, third, one, other, third):
            heard(stream, "beat")
        time.sleep(1.0)
        assert looks.times - before <= time.monotonic() - began_s + 2
    time.sleep(2.5)
    before = looks.times
    time.sleep(1.5)
    assert looks.times == before


def test_a_job_of_which_nothing_can_be_read_is_told_and_found_again(
    looks: Looks, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "IN_JOURNAL_S", 0.2)
    with watching(port) as stream:
        heard(stream, "beat")
        looks.broken = "the journal is gone"
        while heard(stream, "head")["asks"] != ["the journal is gone"]:
            pass
        looks.broken = ""
        while heard(stream, "head")["mood"] != "training":
            pass


def test_every_answer_forbids_the_browser_what_the_page_does_not_need(port: int) -> None:
    for path in ("/", "/static/page.js", "/nothing", "/node?name=x"):
        _, headers, _ = get(port, path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_asks_no_other_host_and_holds_nothing_inline() -> None:
    """A cluster without internet shows it, and a text of a user is never markup."""
    folder = Path(server.__file__).parent / "static"
    for file in (each for each in folder.iterdir() if each.suffix in {".html", ".css", ".js", ".svg"}):
        text = file.read_text()
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), file.name
        assert not any(
            word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write")
        )
        if file.suffix == ".html":
            assert "style=" not in text
            assert "<style" not in text
            assert " on" not in "".join(part for part in text.split("<") if "=" in part).replace(" one", "")
            assert all(part.startswith(' type="module" src="/static/') for part in text.split("<script")[1:])


def test_nothing_can_be_changed(port: int) -> None:
    for path in ("/", "/node", "/static/page.js"):
        assert get(port, path, "POST", "x")[0] == 405


def test_a_node_is_told_closer(port: int) -> None:
    with watching(port) as stream:
        heard(stream, "beat")
    status, _, body = get(port, "/node?name=node0")
    assert status == 200
    assert json.loads(body)["of_ranks"][0]["pid"] == 4711
    assert get(port, "/node?name=node9")[0] == 404


def test_with_a_token_nothing_is_told_before_it_was_brought() -> None:
    with serving(Looks(), TOKEN) as port:
        assert get(port, "/")[1]["location"] == "/login"
        assert get(port, "/events")[0] == 401
        assert get(port, "/node?name=node0")[0] == 401
        assert get(port, "/login", "POST", "token=wrong")[0] == 403
        assert get(port, "/login", "POST", "token=open+sesame", Sec_Fetch_Site="cross-site")[0] == 403
        status, headers, _ = get(port, "/login", "POST", "token=open+sesame")
        assert status == 303
        assert "HttpOnly" in headers["set-cookie"]
        assert "SameSite=strict" in headers["set-cookie"]
        with watching(port, headers["set-cookie"].partition(";")[0]) as stream:
            assert heard(stream, "head")["job"] == "gpt"


def test_a_role_has_its_buttons_and_what_they_ask_names_who_pressed_them_and_why() -> None:
    """An operator has none of an admin's; who has brought no token sees the page without any."""
    asks = Asks()
    with serving(Looks(), others=ROLES, ask=asks) as port:
        nobody = json.loads(get(port, "/buttons")[2])
        assert (nobody["role"], nobody["buttons"], nobody["login"]) == ("viewer", [], True)
        operator, admin = (Browser(port, token) for _, token in ROLES)
        names = [{each["name"] for each in browser.told["buttons"]} for browser in (operator, admin)]
        assert names[1] - names[0] == {"promote", "pause-failover", "end-failover-pause"}
        assert operator.press("pause", {"for": "20m"}) == (200, "it is done")
        assert operator.press("drain", {"node": "node1"}) == (200, "it is done")
        assert operator.press("pause-failover", {"for": "20m"})[0] == 403
        assert admin.press("pause-failover", {"for": "20m"})[0] == 200
    by = "ann, {} of the page"
    assert asks.requests == [
        ControlRequest(c.PauseTraining(1200.0), by.format("operator"), "the file server"),
        LeaveNodeRequest("node1", by.format("operator"), "the file server"),
        ControlRequest(c.PauseFailover(1200), by.format("admin"), "the file server"),
    ]


def test_what_a_controller_refuses_is_said_and_a_page_without_one_says_so() -> None:
    def refuses(request: Request) -> Reply:
        if isinstance(request, ControlRequest) and isinstance(request.control, c.SaveNow):
            return Refused("the job is about to end")
        raise MidstepError("no controller answers")

    with serving(Looks(), others=ROLES, ask=refuses) as port:
        browser = Browser(port, ROLES[0][1])
        assert browser.press("save") == (409, "the job is about to end")
        assert browser.press("allow") == (502, "no controller answers")


def test_the_address_that_is_printed_has_the_key_where_no_server_and_no_log_sees_it() -> None:
    """Behind the #; the page's own script brings it."""
    assert b"/static/login.js" in files_of_login()
    assert "location.hash" in (Path(server.__file__).parent / "static" / "login.js").read_text()


def files_of_login() -> bytes:
    """The page that asks for the token."""
    with serving(Looks(), others=ROLES) as port:
        return get(port, "/login")[2]


def test_there_is_a_limit_of_viewers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_VIEWERS", 1)
    with watching(port):
        assert get(port, "/events")[0] == 503


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--listen", "0.0.0.0:0"], "others than this machine would read the page"),
        (["--listen", "nowhere"], "write HOST:PORT"),
        (["--tls-key", "/dev/null"], "go together"),
        (["--listen", "127.0.0.1:0", "nothing-of-that-name"], "nothing-of-that-name"),
    ],
)
def test_what_is_not_safe_or_not_there_is_refused(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path))
    done = CliRunner().invoke(main, ["page", *options])
    assert done.exit_code == 1
    assert says in done.output


def test_a_token_without_tls_is_not_sent_over_the_network(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    done = CliRunner().invoke(main, ["page", "--listen", "0.0.0.0:0", "--viewers-token-file", str(token)])
    assert "--tls-certificate" in done.output


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(midstep.cli.page, "server")
    monkeypatch.delitem(sys.modules, "midstep.cli.page.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = CliRunner().invoke(main, ["page"])
    assert "pip install 'midstep[operator]'" in done.output


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_with_a_certificate_it_is_served_over_tls_and_the_cookie_stays_there(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost"]
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *made, *files], check=True, capture_output=True, timeout=PATIENCE_S)
    trusted = ssl.create_default_context(cafile=str(certificate))
    with serving(Looks(), TOKEN, str(certificate), str(key)) as port:
        connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=trusted)
        with closing(connection):
            connection.request("POST", "/login", "token=open+sesame")
            answer = connection.getresponse()
            assert answer.status == 303
            assert "Secure" in (answer.getheader("set-cookie") or "")


@pytest.mark.parametrize("command", [["run", "train.py"], ["demo"]])
def test_a_page_beside_a_job_is_for_this_machine_only(command: list[str]) -> None:
    done = CliRunner().invoke(main, [command[0], "--page", "0.0.0.0:0", *command[1:]])
    assert done.exit_code == 1
    assert "`midstep page --listen 0.0.0.0:0` serves others" in done.output
