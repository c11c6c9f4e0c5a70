"""Policies, manifests and fault schedules, changed at random

Good ones are cut, spliced, nested and given other values; `MIDSTEP_FUZZ_CASES` says how often.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from midstep.launch.rank_environment import load_schedule
from midstep.policies.acjob.translation import translate
from midstep.policies.code_files import load_codes
from midstep.policies.files import load_policy, parse_policy, render
from midstep.protocol.errors import ConfigurationError

from .attack import attack
from .fuzzing import CASES, LIMIT_S
from .text_mutation import mutated, mutated_tree

pytestmark = pytest.mark.timeout(LIMIT_S)

WORK_S = 10.0  # of the processor, for one case that takes milliseconds
ROOT = Path(__file__).parents[2]
POLICY = b"""\
ladder: [{rung: recover_in_place, budget: {per_rank: 3}}, {rung: recover, attempts: 2}, {rung: stop}]
deadlines: {quiesce_s: 20, start_s: 1.5e+2}
checkpoint: {directory: /data/gpt, every_steps: 10, keep: 2}
faults:
  codes: {"80E01801": RestartNPU, "8C1F86*": {level: Separate, kind: switch, meaning: "a fan"}}
  too_often: [{codes: ["80E18005"], times: 3, window_s: 86400}]
standby: {warm: true, preload: [numpy]}
"""
SCHEDULE = b"""\
faults:
  - {rank: 1, do: memory-persistent, at: forward, step: 40}
  - {node: node1, do: link-down, at: collective, operation: allreduce, group: [0, 1], rate: 0.001}
"""


def read_policy(path: Path) -> None:
    """Read a policy; what was read is the same when it is written and read again."""
    policy = load_policy(path)
    assert parse_policy(render(policy), "again") == policy


def read_manifest(path: Path) -> None:
    """Translate a manifest; the policy that comes out can be loaded."""
    parse_policy(translate(path.read_bytes().decode("utf-8", "surrogateescape"), str(path)).text, "again")


def refusal(read: Callable[[Path], Any], path: Path) -> str | None:
    """What a reader says against a file; None if it has read it."""
    try:
        read(path)
    except ConfigurationError as error:
        return str(error)
    return None


READERS: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
    "policy": (POLICY, read_policy),
    "code table": (b'version: 1\ncodes:\n  "80E01801": {level: RestartBusiness}\n  "A*": Separate\n', load_codes),
    "fault schedule": (SCHEDULE, lambda path: load_schedule(path, 2, 2)),
    "manifest": ((ROOT / "examples" / "acjob.yaml").read_bytes(), read_manifest),
}


@attack(
    "changes policies, code tables, fault schedules and manifests at random",
    holds="each is read or refused in bounded work, and one that is read can be written and read again",
    reads="file, key or line, and what is allowed",
)
@pytest.mark.parametrize("kind", READERS)
def test_changed_files_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Only the documented error leaves a reader, and the next good file is read."""
    good, read = READERS[kind]
    chance = random.Random(34)
    others = [text for text, _ in READERS.values()]
    tree = next(iter(yaml.safe_load_all(good)))
    path = tmp_path / "file.yaml"
    for case in range(CASES):
        if chance.random() < 0.4:
            text = yaml.safe_dump(mutated_tree(tree, chance), allow_unicode=True)
            changed = text.encode("utf-8", "surrogatepass")
        else:
            changed = mutated(good, others, chance)
        path.write_bytes(changed)
        began = time.process_time()
        complaint = refusal(read, path)
        assert complaint is None or str(path) in complaint, (case, changed[:300])
        assert time.process_time() - began < WORK_S, (case, changed[:300])
    path.write_bytes(good)
    read(path)
