"""`midstep run`: what is refused before anything is made or started."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.cli.run import command
from midstep.devices.kinds import NPU
from midstep.launch.job import Start, create_job
from midstep.launch.joining import prepare
from midstep.launch.meeting import RendezvousPoint, Wishes
from midstep.launch.script_imports import MOST_BYTES, MOST_FILES, refuse_another_size
from midstep.policies.schema import ScalePolicy
from midstep.protocol.errors import ConfigurationError, PolicyError
from midstep.protocol.token import new_token


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that is there, and is never run."""
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit\n")
    return path


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".", "..", "-x", ".hidden", "a b", "x" * 65, "a\n", "ä", "a\0"])
def test_a_job_s_name_cannot_lead_out_of_the_directory_of_jobs(
    name: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes a directory below the base; anything that is more than a name is refused, and nothing is made."""
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path / "jobs"))

    with pytest.raises(ConfigurationError, match="is not a valid job name; allowed: up to 64 letters"):
        create_job(Start(command=(str(script),), job=name))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.parametrize(("nodes", "spares"), [(2, 0), (1, 1)])
def test_npus_of_one_machine_are_not_given_out_twice(nodes: int, spares: int, script: Path, tmp_path: Path) -> None:
    """A second node of the machine would begin with device 0 again."""
    start = Start(command=(str(script),), nodes=nodes, spare_nodes=spares, device=NPU, job_directory=tmp_path / "job")

    with pytest.raises(ConfigurationError, match="would take the same devices"):
        create_job(start)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_a_job_is_not_started_over_another(script: Path, tmp_path: Path) -> None:
    """What the first one left, journal and checkpoints, stays as it is."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "journal.sqlite").write_bytes(b"of an earlier job")

    with pytest.raises(ConfigurationError, match=r"holds a job already\. Choose another --job or --job-dir"):
        create_job(Start(command=(str(script),), job_directory=tmp_path / "job"))

    assert [path.name for path in (tmp_path / "job").iterdir()] == ["journal.sqlite"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("polcy", "Did you mean 'policy'?"),
        ("reprot", "Did you mean 'report'?"),
        ("xyzzy", "Commands: run, resume, demo, "),
    ],
)
def test_a_command_that_is_not_there_is_answered_with_the_nearest(typed: str, words: str) -> None:
    """Or with all of them."""
    result = CliRunner().invoke(main, [typed])

    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "4:1"], "'4:1': the fewest nodes come first, as in 1:4"),
        (["--nnodes", "1:"], "'' is not a whole number of at least 1"),
        (["--nnodes", "two"], "'two' is not a whole number of at least 1"),
        (["--nnodes", "-1"], "not a whole number"),
        (["--nnodes", "0"], "0 is not in the range"),
    ],
)
def test_what_only_torchrun_takes_is_refused_with_what_to_write_instead(
    options: list[str], words: str, script: Path
) -> None:
    """Whoever comes from torchrun has such command lines."""
    result = CliRunner().invoke(command, [*options, str(script)])

    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_range_of_nodes_is_what_the_policy_calls_its_fewest(tmp_path: Path, script: Path) -> None:
    """`--nnodes MIN:MAX`, with torchrun's time for the last call; other things of the policy stay."""
    start = Start(
        command=(str(script),), nodes=4, least_nodes=2, last_call_s=5.0, job_directory=tmp_path / "job", job="few"
    )
    job = create_job(start)
    job.held.remove()
    assert (job.spec.nodes, job.spec.world_size) == (4, 4)
    assert job.policy.scale == ScalePolicy(min_nodes=2, last_call_s=5.0)
    assert job.spec.settings.resizes


FSDP = "from torch.distributed.fsdp import fully_shard\n"
MEGATRON = "import megatron.core\n"


@pytest.mark.parametrize(
    ("files", "options", "named", "framework"),
    [
        ({"train.py": "import torch\n\nfrom midstep.adapters.megatron import a\n"}, {}, "train.py, line 3", "Megatron"),
        ({"train.py": f"def main():\n    {MEGATRON}"}, {}, "train.py, line 2", "Megatron"),
        ({"train.py": "import mindspeed.megatron_adaptor\n"}, {}, "train.py, line 1", "Megatron"),
        ({"train.py": ""}, {"mindio": True}, "--mindio", "Megatron"),
        ({"train.py": f"import midstep\n{FSDP}"}, {}, "train.py, line 2", "fully_shard"),
        (
            {"train.py": "import midstep\nfrom torch.distributed import _composable as c\nc.fsdp.fully_shard(1)\n"},
            {},
            "train.py, line 3",
            "fully_shard",
        ),
        (
            {"train.py": f"import midstep\ntry:\n    import a\nexcept ImportError:\n    {FSDP}"},
            {},
            "train.py, line 5",
            "fully_shard",
        ),
        ({"train.py": "from midstep.adapters import torchtitan\n"}, {}, "train.py, line 1", "torchtitan"),
        (
            {},
            {"command": ("midstep.adapters.torchtitan", "--module", "llama3"), "is_module": True},
            "--titan",
            "torchtitan",
        ),
        ({"train.py": "import midstep, model\n", "model.py": FSDP}, {}, "model.py, line 1", "fully_shard"),
        (
            {
                "train.py": "from midstep import TrainState\nfrom lib import model\nimport broken\n",
                "broken.py": "this is no Python (\n",
                "lib/__init__.py": "",
                "lib/model.py": "import train\nfrom . import model\nfrom .deep.layers import shard\n",
                "lib/deep/layers.py": f"import lib.model\n{FSDP}",
            },
            {},
            "lib/deep/layers.py, line 2",
            "fully_shard",
        ),
        (
            {"job/train/__main__.py": "from .. import parts\n", "job/parts.py": MEGATRON},
            {"command": ("job.train",), "is_module": True},
            "job/parts.py, line 1",
            "Megatron",
        ),
    ],
)
def test_a_script_of_a_framework_whose_world_keeps_its_size_refuses_fewer_nodes_before_anything_starts(
    files: dict[str, str], options: dict[str, Any], named: str, framework: str, tmp_path: Path
) -> None:
    """By what it imports itself, or in modules beside it; those are read, and never run."""
    given = {"command": (str(tmp_path / "train.py"),), "working_directory": tmp_path, **options}
    write_all(tmp_path, files)
    start = Start(nodes=2, least_nodes=1, job_directory=tmp_path / "made", **given)
    with pytest.raises(ConfigurationError, match=f"{named}: a world of another size is not possible with {framework}"):
        create_job(start)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": "import torch\n"},
        {"train.py": "import mega\nfrom . import megatron\n"},
        {"train.py": "this is no Python (\n"},
        {"train.py": "import midstep, helper, torch.distributed.fsdp\n", "helper.py": "import train, helper, broken\n"},
        {"train.py": "import midstep, broken, latin\n", "broken.py": "def (\n", "latin.py": "\0"},
        {"train.py": f"import midstep, {'a' * 300}\n", "unused.py": FSDP},
        {"train.py": f"from typing import TYPE_CHECKING as T\nimport typing\nif typing.TYPE_CHECKING:\n    {MEGATRON}"},
        {"train.py": f"import midstep\ntry:\n    {MEGATRON}except (ImportError, OSError):\n    core = None\n"},
        {"train.py": FSDP},
    ],
    ids=[
        "torch",
        "other names",
        "no Python",
        "a circle",
        "broken helpers",
        "not imported",
        "for types",
        "may be missing",
        "restarted as a whole",
    ],
)
def test_another_script_may_train_on_fewer_nodes(files: dict[str, str], tmp_path: Path) -> None:
    write_all(tmp_path, files)
    start = Start(command=(str(tmp_path / "train.py"),), nodes=2, least_nodes=1, job_directory=tmp_path / "made")
    job = create_job(start)
    job.held.remove()
    assert job.spec.settings.resizes


def test_however_many_modules_lie_beside_a_script_few_are_read(tmp_path: Path) -> None:
    """A chain that is longer than the levels, a file that is too long, and more files than are read: in under 10 s."""
    chain = {f"m{number}.py": f"import m{number + 1}\n" for number in range(20)} | {"m20.py": MEGATRON}
    many = {f"n{number}.py": "" for number in range(2 * MOST_FILES)}
    script = f"import m0, long, {', '.join(name.removesuffix('.py') for name in many)}, last\n"
    write_all(tmp_path, {"train.py": script, **chain, **many, "last.py": MEGATRON})
    (tmp_path / "long.py").write_text(MEGATRON + "#" * MOST_BYTES)
    began = time.monotonic()
    refuse_another_size((str(tmp_path / "train.py"),), tmp_path, is_module=False, mindio=False)
    assert time.monotonic() - began < 10.0


def write_all(folder: Path, files: dict[str, str]) -> None:
    """Write a script and what lies beside it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_policy_whose_world_cannot_get_smaller_refuses_a_range_of_nodes(tmp_path: Path, script: Path) -> None:
    """It says which of its keys is in the way."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("restore: [replica]\n")
    start = Start(command=(str(script),), nodes=4, least_nodes=2, policy_file=policy, job_directory=tmp_path / "job")
    with pytest.raises(PolicyError, match=r"with --nnodes 2:4.*\n?.*scale\.min_nodes: needs checkpoint in restore"):
        create_job(start)


@pytest.mark.parametrize("further", [[], ["--platform", "ray"]])
def test_proxies_are_refused_where_no_machine_joins(further: list[str], script: Path) -> None:
    """They would be left out in silence."""
    said = CliRunner().invoke(main, ["run", "--proxy", "rack7:29410", *further, str(script)])
    assert said.exit_code == 1
    assert "--proxy is for machines that join a job" in said.output


def test_proxies_that_the_policy_does_not_let_in_are_warned_of(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path / "jobs"))
    policy = tmp_path / "policy.yaml"
    for number, allowed in enumerate((False, True)):
        policy.write_text(f"controller: {{proxies: {str(allowed).lower()}}}\n")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        point = RendezvousPoint("127.0.0.1", port, f"j{number}", True, 600.0, "")
        caplog.clear()
        start = Start(command=(str(script),), policy_file=policy)
        machine = prepare(point, new_token(), start, Wishes(proxies=("tcp://rack7:29410",)))
        machine.held.remove()
        assert machine.claim is not None
        machine.claim.close()
        assert ("lets none in" in caplog.text) is not allowed
