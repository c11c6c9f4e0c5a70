"""The chain of causes: each event with its number, and what followed from it."""

from midstep.cli.story import story_lines
from midstep.controller.story import StoryEntry, turns
from midstep.protocol.messages import FaultReported, StoreMoved
from midstep.protocol.types import FaultKind, FaultReport, StoreEndpoint
from midstep.testing.fake_cluster import FakeCluster


def story_of(job: FakeCluster) -> list[StoryEntry]:
    """Return what a machine tells to which the same happens."""
    return list(turns(job.new_machine(), job.journal))


def text(turn: StoryEntry) -> str:
    return "\n".join(story_lines(turn))


def test_each_command_stands_below_the_event_that_caused_it() -> None:
    """With its receivers, and the rank where those do not say it."""
    job = FakeCluster().start()
    began = len(job.journal)
    job.feed(job.exited(1))
    job.recover(5)
    story = story_of(job)
    killed = text(story[began])
    assert killed.startswith(f"#{began + 1} ")
    assert "process exited: rank 1, node node0" in killed
    assert "status -9   [running -> quiescing]" in killed
    assert "-> rank/0, rank/2, rank/3: quiesce: generation 2" in killed
    assert "-> node/node0: start process: rank 1, incarnation 2, generation 2" in killed
    assert text(story[-1]).endswith("[resuming -> running]")


def test_an_incident_has_its_events_from_the_first_report_to_the_last_step() -> None:
    """All others are no part of it."""
    job = FakeCluster().start()
    began = len(job.journal)
    job.feed(job.exited(1))
    job.recover(5)
    job.feed(StoreMoved("node0", StoreEndpoint("127.0.0.1", 2)))
    told = [turn.number for turn in story_of(job) if 1 in turn.incidents]
    assert told == list(range(began + 1, len(job.journal)))


def test_an_event_that_changes_nothing_says_why() -> None:
    job = FakeCluster().start()
    job.feed(job.committed(0, 1), job.exited(1), job.exited(1))
    assert "nothing follows: exit of an earlier process" in text(story_of(job)[-1])


def test_what_a_rank_says_of_itself_begins_no_line_of_its_own() -> None:
    """Whatever is in its report."""
    job = FakeCluster().start()
    forged = "seen\n#99     the job is over with exit code 0\x1b[2J"
    job.feed(FaultReported(FaultReport(FaultKind.EXCEPTION, job.now, "rank/1", forged, 1, "node0", 1, 1)))
    lines = [line for turn in story_of(job) for line in story_lines(turn)]
    assert not any(line.startswith("#99") or "\x1b" in line for line in lines)
    assert all("\n" not in line for line in lines)
