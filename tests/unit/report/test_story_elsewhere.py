"""The story of a job for operators on other machines: what of it one answer holds, and in whose time it is read."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from midstep.cli.story import STORY_PROGRAM, told
from midstep.controller.endpoints import story as story_excerpt
from midstep.controller.endpoints import story as storyteller
from midstep.controller.endpoints.control_requests import Refused, Reply, StoryReply, StoryRequest
from midstep.controller.endpoints.story import StoryOrder, Storyteller, excerpt
from midstep.controller.etcd.place import Access, parse_place
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.opening import ControllerPlace
from midstep.controller.recovery.events import StopRequested
from midstep.controller.story import StoryEntry, turns
from midstep.policies.schema import default_policy
from midstep.protocol.compat import within
from midstep.testing.fake_cluster import FakeCluster, job

from ..test_journal import entry

PATIENCE_S = 60.0


def story() -> list[StoryEntry]:
    """The story of a job with two incidents."""
    cluster = FakeCluster().start()
    for _ in range(2):
        cluster.feed(cluster.exited(1))
        cluster.recover(5)
    return list(turns(cluster.new_machine(), cluster.journal))


def numbers(reply: StoryReply) -> list[int]:
    """The numbers of the events that were told."""
    return [int(event[1:].split()[0]) for event in reply.told]


def test_a_story_that_fits_is_told_whole_and_one_incident_alone() -> None:
    whole = story()
    second = [entry.number for entry in whole if 2 in entry.incidents]

    assert numbers(excerpt(whole, None, told)) == [entry.number for entry in whole]
    reply = excerpt(whole, 2, told)
    assert (numbers(reply), reply.first, reply.earlier_left_out, reply.later_left_out) == (second, 1, 0, 0)


@pytest.mark.parametrize("bound", ["MOST_EVENTS", "MOST_BYTES"])
def test_of_a_long_story_the_latest_is_told_and_of_an_incident_what_led_to_it(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """What is left out is counted, and on which side."""
    whole = story()
    second = [entry.number for entry in whole if 2 in entry.incidents]
    monkeypatch.setattr(story_excerpt, bound, 3 if bound == "MOST_EVENTS" else 800)

    latest, incident = excerpt(whole, None, told), excerpt(whole, 2, told)

    assert latest.told
    assert numbers(latest) == [entry.number for entry in whole][latest.earlier_left_out :]
    assert (latest.earlier_left_out, latest.later_left_out) == (len(whole) - len(latest.told), 0)
    assert incident.told
    assert numbers(incident) == second[: len(incident.told)]
    assert (incident.earlier_left_out, incident.later_left_out) == (0, len(second) - len(incident.told))


def test_an_event_that_is_longer_than_any_may_be_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story_excerpt, "LONGEST_EVENT", 20)
    assert all(len(event) < 40 and event.endswith("(cut)") for event in excerpt(story(), 1, told).told)


# --- in a process of its own --------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> ControllerPlace:
    """A job whose journal has one event."""
    found_journal(journal_path(tmp_path), job(), default_policy())
    with open_sqlite(journal_path(tmp_path)) as journal:
        journal.append([entry(StopRequested("enough"), 1)], 100.0)
    return ControllerPlace(tmp_path, tmp_path, tmp_path, "tcp://127.0.0.1:0")


async def until(holds: Callable[[], bool]) -> None:
    """Let others run until something holds."""
    while not holds():
        await asyncio.sleep(0.01)


async def answers(teller: Storyteller, asked: int) -> list[Reply]:
    """Ask so often at once, and wait for all answers."""
    given: list[Reply] = []
    task = asyncio.create_task(teller.run())
    for _ in range(asked):
        teller.tell(StoryRequest(), given.append)
    await within(PATIENCE_S, until(lambda: len(given) == asked))
    task.cancel()
    await asyncio.wait([task])
    return given


def test_a_story_is_read_from_the_journal_by_another_process(place: ControllerPlace) -> None:
    (reply,) = asyncio.run(answers(Storyteller(STORY_PROGRAM, place), 1))
    assert isinstance(reply, StoryReply)
    (event,) = reply.told
    assert "stop requested: reason enough" in event


def test_an_order_names_an_etcd_with_all_that_it_asks_for() -> None:
    etcd = parse_place("etcds://m0:2379,m1:2379/jobs", "demo", Access("ca", "cert", "key", "user", "secret"))
    order = StoryOrder("/job", etcd, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=StoryOrder) == order


def test_a_journal_that_cannot_be_read_is_a_refusal_with_its_reason(place: ControllerPlace) -> None:
    elsewhere = msgspec.structs.replace(place, job_directory=place.job_directory / "none")
    (refused,) = asyncio.run(answers(Storyteller(STORY_PROGRAM, elsewhere), 1))
    assert isinstance(refused, Refused)
    assert "there is no journal" in refused.reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; time.sleep(60)", "takes more than"),
        ("print('nonsense')", "ended with status 0"),
        ("raise SystemExit(3)", "ended with status 3"),
    ],
)
def test_a_process_that_does_not_answer_well_is_ended_and_costs_its_asker_the_answer_only(
    place: ControllerPlace, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    monkeypatch.setattr(storyteller, "READ_S", 1.0)
    (refused,) = asyncio.run(answers(Storyteller((sys.executable, "-c", program), place), 1))
    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_more_than_a_few_are_not_kept_waiting(place: ControllerPlace) -> None:
    given = asyncio.run(answers(Storyteller((sys.executable, "-c", ""), place), 6))
    refused = [each for each in given if isinstance(each, Refused) and "try again" in each.reason]
    assert len(refused) == 6 - storyteller.MOST_WAITING
