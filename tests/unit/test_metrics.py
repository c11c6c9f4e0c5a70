"""The numbers for Prometheus: which there are, that they follow from the job, and that a scrape reads nothing else."""

import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
from prometheus_client.parser import text_string_to_metric_families

from midstep.benchmarks.metrics import START_S, beaten, training
from midstep.controller.endpoints import metrics_server
from midstep.controller.endpoints.metrics_server import (
    MOST_AT_ONCE,
    MetricsServer,
    PublishedMetrics,
    families,
    metrics_place,
)
from midstep.controller.metrics import METRICS, MOST_REASONS, MetricKind, MetricsBook, MetricsSnapshot, Observation
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.time_account import TimeAccount
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.time_spent import TimeCategory
from midstep.testing.fake_cluster import FakeCluster

ROOT = Path(__file__).parents[2]
PATIENCE_S = 10.0
MANY, RANKS_OF_A_NODE = 10_000, 16


def observed(cluster: FakeCluster, *, step: int = 5, refused: dict[str, int] | None = None) -> Observation:
    """The job of a fake cluster, as its controller would see it."""
    now = cluster.now
    return Observation(
        now, cluster.machine.state, step, cluster.times.until(now), cluster.times.windows(now), refused or {}, 1
    )


def test_an_incident_is_counted_once_with_its_parts(cluster: FakeCluster) -> None:
    """By rung, end and first fault; the parts are those of the incident."""
    book = MetricsBook("1")
    cluster.now += 100.0
    cluster.feed(cluster.exited(1))
    opened = book.snapshot(observed(cluster))
    assert sum(opened.distributions["midstep_recovery_seconds"][("whole",)].counts) == 0  # and not absent
    assert opened.values["midstep_incident_open"] == {(): 1.0}
    assert opened.values["midstep_phase"][("quiescing",)] == 1.0
    before = opened.values["midstep_incidents_total"]
    assert before["recover_in_place", "resumed", "exit"] == 0.0  # there before: only then has it increased
    assert set(before.values()) == {0.0}
    cluster.now += 5.0
    cluster.recover(5)
    for _ in range(2):
        closed = book.snapshot(observed(cluster))
    ended = {labels: count for labels, count in closed.values["midstep_incidents_total"].items() if count}
    assert ended == {("recover_in_place", "resumed", "exit"): 1.0}
    assert closed.values["midstep_budget_used"]["recover_in_place", "job"] == 1.0
    parts = closed.distributions["midstep_recovery_seconds"]
    assert sum(parts[("whole",)].counts) == 1
    assert parts[("quiesce",)].total == pytest.approx(5.0, abs=0.1)
    assert parts[("whole",)].total == pytest.approx(
        sum(each.total for (part,), each in parts.items() if part != "whole"), abs=0.01
    )


def test_steps_are_counted_by_the_time_that_they_took(cluster: FakeCluster) -> None:
    book = MetricsBook("1")
    for step, now in ((5, 1.0), (5, 2.0), (9, 3.0), (10, 3.5)):
        cluster.now = 2000.0 + now
        steps = book.snapshot(observed(cluster, step=step)).distributions["midstep_step_seconds"][()]
    assert sum(steps.counts) == 5
    assert steps.total == pytest.approx(2.5)


def test_the_counter_of_time_never_falls(cluster: FakeCluster) -> None:
    """Time that was training is detection afterwards; the counter of training stands still until it is made up."""
    book = MetricsBook("1")
    cluster.now += 100.0
    late_s = cluster.now
    exited = cluster.exited(1)
    cluster.now += 30.0
    before = book.snapshot(observed(cluster)).values["midstep_time_seconds_total"]
    cluster.feed(exited)
    after = book.snapshot(observed(cluster)).values["midstep_time_seconds_total"]
    assert late_s < cluster.now
    assert after[("detect",)] > 29.0
    assert all(after[labels] >= value for labels, value in before.items())


def test_reasons_beyond_a_bound_are_counted_together(cluster: FakeCluster) -> None:
    refused = {f"reason {number}": 1 for number in range(MOST_REASONS + 7)}
    told = MetricsBook("1").snapshot(observed(cluster, refused=refused)).values["midstep_messages_refused_total"]
    assert len(told) == MOST_REASONS + 1
    assert told[("other",)] == 7.0


def test_every_metric_has_its_labels_and_no_other_is_told(cluster: FakeCluster) -> None:
    """As Prometheus' own parser reads it. Counters end in _total, and times and shares have their unit in the name."""
    snapshot = MetricsBook("1").snapshot(observed(cluster))
    assert {*snapshot.values, *snapshot.distributions} == {*METRICS}
    for name, metric in METRICS.items():
        told = [*snapshot.values.get(name, ()), *snapshot.distributions.get(name, ())]
        assert all(len(labels) == len(metric.labels) for labels in told), name
        assert name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert not metric.unit or re.fullmatch(rf"midstep_\w*{metric.unit}(_total)?", name)
    assert len(snapshot.values["midstep_time_seconds_total"]) == len(TimeCategory)
    assert sum(len(family.samples) for family in families(snapshot)) < 300


def test_the_page_of_metrics_has_each_with_its_unit_and_labels() -> None:
    """`docs/metrics.md` is made by hand, and held against the list."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `midstep_")]
    told = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    assert told == [row_of(name) for name in METRICS]


def row_of(name: str) -> tuple[str, str, str, str, str]:
    """The line of a metric in the docs."""
    metric = METRICS[name]
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"`{name}`", str(metric.kind), metric.unit, labels, metric.says


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(cluster: FakeCluster) -> MetricsSnapshot:
    """What a loop has published."""
    return MetricsBook("1").snapshot(observed(cluster))


@pytest.fixture
def serve() -> Iterator[object]:
    """Serve a snapshot, and return where."""
    servers: list[MetricsServer] = []

    def started(snapshot: MetricsSnapshot, token_file: Path | None = None) -> str:
        published, told = PublishedMetrics(), Queue[str]()
        published.latest = snapshot
        servers.append(MetricsServer(metrics_place("127.0.0.1:0", token_file), published, told.put))
        servers[-1].start()
        return told.get(timeout=PATIENCE_S)

    yield started
    for server in servers:
        server.close()


def scraped(address: str, token: str = "") -> str:
    """What a scraper reads."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=PATIENCE_S) as answer:
        told: str = answer.read().decode()
        return told


def test_a_scrape_tells_what_was_published(snapshot: MetricsSnapshot, serve: type) -> None:
    told = {family.name: family for family in text_string_to_metric_families(scraped(serve(snapshot)))}
    assert {name.removesuffix("_total") for name in METRICS} == {*told}
    (step,) = told["midstep_step"].samples
    assert step.value == 5.0


def published_by(nodes: int) -> MetricsSnapshot:
    """What the loop publishes of a job that trains, of so many nodes."""
    machine, account = training(nodes, RANKS_OF_A_NODE)
    board, now = beaten(nodes, RANKS_OF_A_NODE), START_S
    seen = Observation(now, machine.state, board.reached(), account.until(now), account.windows(now), {}, 1)
    return MetricsBook("1").snapshot(seen)


def test_a_scrape_of_ten_thousand_ranks_is_the_work_of_one_of_sixteen_and_asks_the_loop_for_nothing(
    serve: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The series are the same, whatever the size; a thread makes the answer, of nothing but what was published.

    How long it takes is measured by `benchmarks/metrics.py`.
    """
    small, large = published_by(1), published_by(MANY // RANKS_OF_A_NODE)
    assert large.values["midstep_ranks_asked"] == {(): MANY}
    assert large.values["midstep_ranks"][("training",)] == MANY
    made_by: list[int] = []

    def made(snapshot: MetricsSnapshot) -> Iterator[object]:
        made_by.append(threading.get_ident())
        assert snapshot is large
        return families(snapshot)

    def asked(*args: object) -> None:
        raise AssertionError("a scrape has asked for what the loop knows")

    address = serve(large)
    monkeypatch.setattr(metrics_server, "families", made)
    for of in (MetricsBook, RecoveryMachine, TimeAccount):
        for name in ("snapshot", "state", "until", "windows"):
            if hasattr(of, name):
                monkeypatch.setattr(of, name, asked)
    told = [scraped(address) for _ in range(3)]
    assert len(made_by) == 3
    assert threading.get_ident() not in made_by
    assert told[0].count("\n") < 600
    assert told == told[:1] * 3
    monkeypatch.undo()
    assert series(large) == series(small)


def series(snapshot: MetricsSnapshot) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Name and labels of each series."""
    return {(each.name, tuple(each.labels.items())) for family in families(snapshot) for each in family.samples}


def test_a_scrape_without_the_token_is_refused(snapshot: MetricsSnapshot, serve: type, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    token.chmod(0o600)
    address = serve(snapshot, token)
    assert "midstep_step 5.0" in scraped(address, "sesame")
    for wrong in ("", "sesam", "sesame2"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scraped(address, wrong)


def test_connections_beyond_the_room_are_closed_and_scrapes_go_on_after_them(
    snapshot: MetricsSnapshot, serve: type
) -> None:
    """Those that say nothing hold a place until they leave; one more is closed at once."""
    address = serve(snapshot)
    host, port = re.findall(r"//(.+):(\d+)/", address)[0]
    silent = [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(MOST_AT_ONCE)]
    time.sleep(0.5)  # until all are taken in, one after the other
    with socket.create_connection((host, int(port)), PATIENCE_S) as late:
        late.settimeout(PATIENCE_S)
        assert late.recv(1) == b""
    for each in silent:
        each.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            assert "midstep_step 5.0" in scraped(address)
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail("nobody is served any more")


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("9400", "write HOST:PORT"),
        ("localhost:ninety", "write HOST:PORT"),
        ("127.0.0.1:99999", "write HOST:PORT"),
        ("0.0.0.0:9400", "give --metrics-token-file"),
        ("[::]:9400", "give --metrics-token-file"),
    ],
)
def test_a_place_that_will_not_do_says_why(listen: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        metrics_place(listen, None)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame")
    token.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        metrics_place("0.0.0.0:9400", token)
