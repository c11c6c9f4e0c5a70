"""Topics of the recovery machine stay apart: a fact is written in one file, and a new deadline is declared in one."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import midstep
from midstep.controller.recovery import fitness, incident, state, world
from midstep.controller.recovery.events import ControllerStarted
from midstep.controller.recovery.machine import TOPICS, RecoveryMachine
from midstep.controller.recovery.state import JobState, Phase
from midstep.controller.recovery.topic import Deadline, Follow, Recs, Topic
from midstep.testing.fake_cluster import FakeCluster

RECOVERY = Path(midstep.__file__).parent / "controller" / "recovery"
# The records of the machine's memory, by the words that topics have for one. A record's own file has its verbs.
RECORDS = {
    "due": "Due", "clocks": "Clocks", "saving": "Saving", "planned": "Planned", "change": "PlannedChange",
    "current": "PlannedChange", "newcomer": "Newcomer", "unwell": "Unwell", "unwell[name]": "Unwell",
    "accounts": "Accounts", "arrivals": "Arrivals", "progress": "Progress", "turn": "Turn", "state": "JobState",
    "holder": "Holder", "holders[rank]": "Holder", "node": "Node", "nodes[name]": "Node", "meeting": "Meeting",
    "world": "World", "history": "History", "book": "FaultBook", "checks": "NodeChecks",
}  # fmt: skip
OWN = {fitness, incident, state, world}
FIELDS = {
    f"{name}.{each.name}"
    for name in RECORDS.values()
    for module in OWN
    if name in vars(module)
    for each in dataclasses.fields(vars(module)[name])
}
CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"}
MOST_WRITERS, MOST_READERS = 1, 3
# What still has to fall: the fields that more files write, or read, with their number.
WRITTEN_BY_MORE = {
    "Due.held": 2, "Due.incident": 2, "Due.unplaced": 2, "Holder.pid": 2, "Holder.report": 2,
    "JobState.incident": 5, "JobState.repair": 2, "Node.state": 2,
    "PlannedChange.stage": 2,
}  # fmt: skip
READ_BY_MORE = {
    "Arrivals.can_be_created": 6, "Due.phase_s": 4, "Due.unplaced": 4,
    "Planned.current": 6, "Planned.going": 4, "Progress.committed": 4,
}  # fmt: skip
OF_ONE_TOPIC = {"Due", "Clocks", "Saving", "Planned", "PlannedChange", "Unwell", "Accounts", "Arrivals", "Progress"}


def written(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Every attribute that a module assigns, deletes, or changes in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            waiting = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            waiting = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            waiting = [node.func.value]
        else:
            continue
        while waiting:
            target = waiting.pop()
            if isinstance(target, ast.Tuple | ast.List):
                waiting += target.elts
            elif isinstance(target, ast.Subscript):
                waiting.append(target.value)
            elif isinstance(target, ast.Attribute):
                yield target


def field(attribute: ast.Attribute) -> str:
    """The field of a record that an attribute is; empty: it is of no record, or of one by another word."""
    name = f"{RECORDS.get(ast.unparse(attribute.value).rpartition('.')[2])}.{attribute.attr}"
    return name if name in FIELDS else ""


def users(*, writing: bool) -> dict[str, set[str]]:
    """The files that write, or use, each field, without those that define the records."""
    found: dict[str, set[str]] = {}
    own = {each.__name__.rpartition(".")[2] for each in OWN}
    for path in RECOVERY.glob("*.py"):
        tree = ast.parse(path.read_text())
        attributes = written(tree) if writing else (each for each in ast.walk(tree) if isinstance(each, ast.Attribute))
        for name in {field(each) for each in attributes} if path.stem not in own else ():
            found.setdefault(name, set()).add(path.stem)
    found.pop("", None)
    return found


def test_a_field_is_written_in_one_file() -> None:
    """Beside the file that defines it. The exceptions can only become fewer."""
    more = {name: len(files) for name, files in users(writing=True).items() if len(files) > MOST_WRITERS}
    assert more == WRITTEN_BY_MORE


def test_a_field_of_a_topic_is_read_in_three_files() -> None:
    """At most. The exceptions can only become fewer."""
    of_topics = {name: files for name, files in users(writing=False).items() if name.split(".")[0] in OF_ONE_TOPIC}
    fields = {name: len(files) for name, files in of_topics.items() if len(files) > MOST_READERS}
    assert fields == READ_BY_MORE


def test_where_a_rank_stands_is_written_by_the_table_alone() -> None:
    """`World.take` looks it up; no topic sets it."""
    assert "Holder.state" not in users(writing=True)


def test_a_new_deadline_is_declared_in_one_file(cluster: FakeCluster) -> None:
    """The machine waits for it, tells that it has passed, renews it after a takeover and keeps it in its memory."""
    passed: list[float] = []
    fuse = Deadline("fuse", lambda job: passed.append(job.now), lambda job: 30.0)

    def light(job: JobState) -> Recs:
        if fuse.due(job) is None and not passed:
            fuse.within(job, 5.0)
        return None

    class Longer(FakeCluster):
        def new_machine(self) -> RecoveryMachine:
            topics = (*TOPICS, Topic("fuse", follows=Follow(frozenset({Phase.RUNNING}), light), deadlines=(fuse,)))
            return RecoveryMachine(self.policy, self.job, topics=topics)

    assert cluster.machine.next_deadline() is None
    job = Longer().start()
    lit_s = job.now
    assert job.machine.next_deadline() == lit_s + 5.0
    memory = job.machine.memory()
    job.machine = job.new_machine()
    job.machine.restore(memory)
    job.now += 4.0
    job.feed(ControllerStarted(2))
    assert job.machine.next_deadline() == job.now + 30.0
    job.overdue()
    assert passed == [job.now]
    assert job.machine.next_deadline() is None
