"""The rule that docs/recovery.md adds as an example can be added so, in two files, and does what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import midstep

ROOT = Path(midstep.__file__).parent
RECOVERY = Path("controller", "recovery")
PLAYED = """
from midstep.protocol.messages import NodeJoined, NodeLost
from midstep.protocol.types import StoreEndpoint
from midstep.testing.fake_cluster import FakeCluster

cluster = FakeCluster().start()
spare = cluster.machine.state.world.nodes["node2"]
for pause_s in (0.0, 600.0, 7200.0, 600.0):
    cluster.now += pause_s
    cluster.feed(NodeLost("node2", "no word for 3.0 s", cluster.now))
    restored = cluster.new_machine()
    restored.restore(cluster.machine.memory())
    cluster.machine = restored
    cluster.feed(NodeJoined("node2", "node2", StoreEndpoint("127.0.0.1", 1), ()))
    node = cluster.machine.state.world.nodes["node2"]
    print(node.state, node.note, sep=": ")
"""


def example() -> str:
    """The change that the page shows."""
    page = (ROOT / "docs" / "recovery.md").read_text()
    [diff] = re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return str(diff)


def test_a_rule_about_a_node_is_added_in_two_files(tmp_path: Path) -> None:
    """Also a controller that takes over goes by it."""
    assert len(re.findall(r"^\+\+\+ b/", example(), re.MULTILINE)) == 2
    package = tmp_path / "midstep"
    shutil.copytree(ROOT / RECOVERY, package / RECOVERY)
    for folder in (Path(), Path("controller")):
        for each in (ROOT / folder).iterdir():
            if each.suffix == ".py" or (each / "__init__.py").is_file():
                target = package / folder / each.name
                if not target.exists():
                    target.symlink_to(each)
    apply = ["git", "apply", "-"]
    subprocess.run(apply, cwd=package, input=example(), text=True, check=True, timeout=60)
    played = subprocess.run(
        [sys.executable, "-c", PLAYED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    barred = "isolated: node node2 was lost 2 times within 3600 s"
    assert played.stdout.splitlines() == ["spare: ", barred, "spare: ", barred]
