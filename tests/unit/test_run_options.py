"""`midstep run`: what is refused before anything is made or started."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.cli.run import command
from midstep.devices.kinds import NPU
from midstep.launch.job import Start, create_job
from midstep.policies.schema import ScalePolicy
from midstep.protocol.errors import ConfigurationError, PolicyError


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


@pytest.mark.parametrize(
    ("text", "mindio", "named"),
    [
        ("import torch\n\nfrom midstep.adapters.megatron import resilient\n", False, "train.py, line 3: "),
        ("def main():\n    import megatron.core\n", False, "train.py, line 2: "),
        ("import mindspeed.megatron_adaptor\n", False, "train.py, line 1: "),
        ("", True, "--mindio: "),
    ],
)
def test_a_script_of_megatron_refuses_fewer_nodes_before_anything_starts(
    text: str, mindio: bool, named: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    start = Start(command=(str(script),), nodes=2, least_nodes=1, mindio=mindio, job_directory=tmp_path / "job")
    with pytest.raises(ConfigurationError, match=f"{named}a world of another size is not possible with Megatron"):
        create_job(start)
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("text", ["import torch\n", "import mega\nfrom . import megatron\n", "this is no Python (\n"])
def test_another_script_may_train_on_fewer_nodes(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    job = create_job(Start(command=(str(script),), nodes=2, least_nodes=1, job_directory=tmp_path / "job"))
    job.held.remove()
    assert job.spec.settings.resizes


def test_a_policy_whose_world_cannot_get_smaller_refuses_a_range_of_nodes(tmp_path: Path, script: Path) -> None:
    """It says which of its keys is in the way."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("restore: [replica]\n")
    start = Start(command=(str(script),), nodes=4, least_nodes=2, policy_file=policy, job_directory=tmp_path / "job")
    with pytest.raises(PolicyError, match=r"with --nnodes 2:4.*\n?.*scale\.min_nodes: needs checkpoint in restore"):
        create_job(start)
