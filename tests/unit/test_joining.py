"""How a machine comes to a job: torchrun's flags, what launchers say, where to meet, and who runs the controller."""

import argparse
import asyncio
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from midstep.agent.channel import rank_environment
from midstep.cli.display.display import ShownRanks
from midstep.cli.numbers import RanksPerNode
from midstep.cli.run import command
from midstep.cli.torchrun_flags import REFUSED, WITHOUT_EFFECT
from midstep.launch import meeting as here
from midstep.launch.job import (
    Start,
    let_nodes_join,
    policy_of,
    require_loopback,
    require_unexpired,
    required,
    spec_of,
)
from midstep.launch.joining import EndpointClaim
from midstep.launch.meeting import (
    Flags,
    Launched,
    address_towards,
    first_host,
    is_loopback,
    is_own,
    launched,
    listening_at,
    meeting,
    meets_itself,
)
from midstep.launch.meeting import RendezvousPoint as Point
from midstep.launch.processes import StopSignals
from midstep.policies.schema import default_policy
from midstep.protocol.bounds import MOST_OF_A_NODE
from midstep.protocol.discovery import endpoints, split
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.messages import StartProcess
from midstep.protocol.token import FullToken, new_token, token_text
from midstep.protocol.types import Rendezvous

# --- torchrun's flags -------------------------------------------------------------------------------------------------


def _torch_actions() -> list[argparse.Action]:
    run = pytest.importorskip("torch.distributed.run")
    return [action for action in run.get_args_parser()._actions if action.option_strings and action.dest != "help"]


def test_every_flag_of_this_torchs_torchrun_is_taken_or_refused_by_name() -> None:
    known = {name for option in command.params for name in option.opts}

    missing = {name for action in _torch_actions() for name in action.option_strings} - known

    assert missing == set()


def test_every_default_of_this_torchs_torchrun_is_taken() -> None:
    """A wrapper that spells every default out still works."""
    for action in _torch_actions():
        if action.dest in REFUSED and isinstance(action.default, str) and action.default:
            assert action.default in REFUSED[action.dest].allowed, action.dest


@pytest.mark.parametrize("name", [*REFUSED, *WITHOUT_EFFECT])
def test_flags_that_are_not_midsteps_have_no_other_meaning_there(name: str) -> None:
    (option,) = (each for each in command.params if f"--{name}" in each.opts)

    assert isinstance(option, click.Option)
    assert option.hidden
    assert f"--{name.replace('_', '-')}" in option.opts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--redirects", "4"], "write 0, 1 (stdout), 2 (stderr) or 3 (both)"),
        (["-t", "1:9"], "write 0, 1 (stdout), 2 (stderr) or 3 (both)"),
        (["--local-ranks-filter", "0;1"], "'0;1': write numbers of ranks on their nodes, as in 0,1,2"),
        (["--signals-to-handle", "SIGTERM,SIGKILL"], "'SIGKILL': signals that may end a job are SIGTERM, SIGINT"),
        (["--shutdown-timeout", "-1"], "-1.0 is not in the range 0<=x"),
        (["--duplicate-stdout-filters", "loss"], "write `grep -h -e WORD JOB_DIRECTORY/logs/rank-*.log`"),
        (["--logs-specs", "mine"], "--log-dir says where that is"),
        (["--numa-binding", "node"], "write os.sched_setaffinity(0, CPUS) by LOCAL_RANK"),
        (["--event-log-handler", "console"], "read the job's events with `midstep report --story`"),
        (["--nproc-per-node", "xpu"], "midstep has no device of that kind"),
        (["--no-python", "-m"], "--no-python and -m exclude each other"),
        (["--rdzv-backend", "etcd"], "'etcd': the controller is where machines meet"),
        (["--rdzv-conf", "close_timeout=3"], "deadlines.stop_grace_s of the policy"),
        (["--rdzv-conf", "nonsense=3"], "midstep knows"),
        (["--rdzv-conf", "join_timeout"], "KEY=VALUE"),
    ],
)
def test_what_is_refused_says_what_to_write_instead(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(command, [*arguments, "train.py"])

    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rdzv-endpoint", "127.0.0.1:1"],
        ["--master_addr", "127.0.0.1", "--nnodes", "2", "--tee", "3", "--redirects", "0", "--monitor-interval", "5"],
        ["--rdzv_endpoint", "localhost", "--rdzv_backend", "c10d", "--start-method", "fork", "-r", "0"],
    ],
)
def test_several_machines_need_a_token(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    result = CliRunner().invoke(command, [*arguments, str(tmp_path / "train.py")], env={"MIDSTEP_TOKEN": ""})

    assert result.exit_code == 1
    assert "several machines need the job's token" in result.output


def test_torchruns_variables_are_taken(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    environment = {"PET_RDZV_ENDPOINT": "127.0.0.1:1", "MIDSTEP_TOKEN": ""}

    assert "need the job's token" in CliRunner().invoke(command, [str(tmp_path / "train.py")], env=environment).output
    assert "write 0, 1 (stdout)" in CliRunner().invoke(command, ["train.py"], env={"PET_TEE": "9"}).output


@pytest.mark.parametrize(
    ("words", "gpus", "ranks"), [("gpu", 4, 4), ("auto", 4, 4), ("auto", 0, os.cpu_count()), ("gpu", 0, None)]
)
def test_ranks_are_counted_as_torchrun_counts_them(
    monkeypatch: pytest.MonkeyPatch, words: str, gpus: int, ranks: int | None
) -> None:
    """Where there is no GPU, `gpu` is refused, and `auto` means processors."""
    monkeypatch.setattr("midstep.cli.numbers._gpus", lambda: gpus)
    kind = RanksPerNode(MOST_OF_A_NODE)
    if ranks is None:
        with pytest.raises(click.BadParameter, match="torch finds no CUDA device on this machine"):
            kind.convert(words, None, None)
    else:
        assert kind.convert(words, None, None) == ranks


def test_torchruns_flags_for_output_and_processes_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the ranks print the logs have all in any case; --redirects 3 shows none of it."""
    asked: list[tuple[Start, bool]] = []
    monkeypatch.setattr("midstep.cli.run.create_job", lambda start: start)
    monkeypatch.setattr("midstep.cli.run.run_job", lambda start, *, quiet, **how: asked.append((start, quiet)))
    words = ["--log-dir", str(tmp_path), "-r", "3", "--role", "trainer", "--nproc-per-node", "cpu", "--run-path"]

    CliRunner().invoke(command, [*words, "--job", "demo", "train.py"], catch_exceptions=False)
    CliRunner().invoke(command, ["--tee", "3", "-r", "0:1,1:3", "--nproc-per-node", "auto", "train.py"])

    (first, first_quiet), (second, second_quiet) = asked
    assert first.job_directory == tmp_path / "demo"
    assert first.environment == {"ROLE_NAME": "trainer"}
    assert first.ranks_per_node == second.ranks_per_node == os.cpu_count()
    assert (first_quiet, second_quiet) == (True, False)
    assert second.job_directory is None


def _asked(monkeypatch: pytest.MonkeyPatch, *words: str, **environment: str) -> tuple[Start, dict[str, Any]]:
    """Return the job that a line of torchrun asks for, and how it is run."""
    asked: list[tuple[Start, dict[str, Any]]] = []
    monkeypatch.setattr("midstep.cli.run.create_job", lambda start: start)
    monkeypatch.setattr("midstep.cli.run.run_job", lambda start, **how: asked.append((start, how)))
    CliRunner().invoke(command, [*words, "train.py"], env=environment, catch_exceptions=False)
    return asked[0]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], {0, 1, 2, 3, 4, 5}),
        (["--local-ranks-filter", "0,2"], {0, 2, 3, 5}),
        (["-r", "1:3,2:1"], {0, 2, 3, 5}),
        (["--redirect=3", "--tee", "2:3"], {2, 5}),
        (["-r", "3"], set()),
    ],
)
def test_what_is_shown_goes_by_the_ranks_on_their_nodes(
    monkeypatch: pytest.MonkeyPatch, words: list[str], shown: set[int]
) -> None:
    """A rank whose output is redirected, and not teed, is in its log only; three ranks a node."""
    start, how = _asked(monkeypatch, "--nnodes", "2", "--nproc-per-node", "3", *words)

    assert {rank for rank in range(start.nodes * 3) if how["shown"].shows(rank)} == shown
    assert how["quiet"] is (not shown)


def test_what_stands_before_a_line_is_torchruns_template(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "<${role_name} ${rank}.${local_rank} ${unknown}>"

    _, how = _asked(monkeypatch, "--nproc-per-node", "2", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template)

    assert how["shown"].before_line(3, "") == "<default 3.1 ${unknown}>"
    assert ShownRanks().before_line(3, "") == "[rank 3] "
    assert ShownRanks().before_line(3, "actor") == "[actor rank 3] "


def test_torchruns_signals_and_its_time_to_end_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by its variables; the policy's own time stands where none is given."""
    start, how = _asked(monkeypatch, "--signals-to-handle", "SIGTERM,SIGUSR1", "--shutdown-timeout", "7")

    assert how["stop_signals"] == {signal.SIGTERM, signal.SIGUSR1}
    assert policy_of(start).deadlines.stop_grace_s == 7.0
    assert policy_of(_asked(monkeypatch, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="8")[0]).deadlines.stop_grace_s == 8.0
    assert policy_of(_asked(monkeypatch)[0]) == default_policy()


def test_a_signal_that_was_asked_for_stops_the_job_in_order() -> None:
    """SIGUSR1, which would end the launcher otherwise, and leave no checkpoint."""
    said: list[str] = []

    async def hear() -> None:
        with StopSignals(said.append, also=frozenset({signal.SIGUSR1})):
            os.kill(os.getpid(), signal.SIGUSR1)
            while not said:
                await asyncio.sleep(0.01)

    asyncio.run(hear())

    assert said == ["midstep run received SIGUSR1"]


def test_a_virtual_local_rank_is_refused_on_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a rank takes the device of its local rank, which would be the first one for all."""
    start, _ = _asked(monkeypatch, "--virtual-local-rank", "--device", "npu")

    with pytest.raises(ConfigurationError, match="--virtual-local-rank is for GPUs"):
        policy_of(start)


@pytest.mark.parametrize(
    ("flag", "visible", "local_rank", "gpu"),
    [("1", None, "0", "3"), ("1", "4,5,6,7", "0", "7"), ("1", "4, 5", "0", "5"), ("", "4,5", "3", "4,5")],
)
def test_with_a_virtual_local_rank_each_rank_sees_its_own_gpu(
    flag: str, visible: str | None, local_rank: str, gpu: str
) -> None:
    """The GPU is one of those that are visible; where there are fewer than ranks it is shared."""
    start = Start(command=("train.py",), environment={"MIDSTEP_VIRTUAL_LOCAL_RANK": flag})
    job = spec_of(start, "demo", default_policy(), Path("/jobs/demo"))
    order = StartProcess(3, 3, 0, 1, 1, 0, True, Rendezvous("127.0.0.1", 1, "secret"))
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    found = rank_environment(base, job, order, node="node0", agent_socket="ipc://a", started_s=0.0)

    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == (local_rank, gpu)


def test_quotes_of_a_shell_that_read_nothing_are_no_part_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a list of arguments that somebody has copied from a shell."""
    start, _ = _asked(monkeypatch, "--rdzv-conf='join_timeout=5,last_call_timeout=1'", "--nnodes", "1:2")

    assert start.last_call_s == 1.0


@pytest.mark.parametrize("place", ["environment", "home"])
def test_torchruns_line_joins_with_a_token_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It needs no word more on two machines that share a home, or an environment."""
    token = new_token()
    file = tmp_path / ".midstep" / "token" if place == "home" else tmp_path / "job.token"
    file.parent.mkdir(exist_ok=True, mode=0o700)
    file.write_text(token_text(token))
    file.chmod(0o600)
    asked: list[object] = []
    monkeypatch.setattr("midstep.cli.run.prepare", lambda where, secret, start, wishes: asked.append(secret))
    named = {} if place == "home" else {"MIDSTEP_TOKEN_FILE": str(file)}
    environment = {"HOME": str(tmp_path), "MIDSTEP_TOKEN": "", **named}
    line = ["--nnodes", "2", "--rdzv-id", "demo", "--rdzv-backend", "c10d", "--rdzv-endpoint", "m0:29400", "train.py"]

    CliRunner().invoke(command, line, env=environment)

    assert asked == [token]


# --- where to meet ----------------------------------------------------------------------------------------------------


def test_without_an_endpoint_all_nodes_are_on_this_machine() -> None:
    assert meeting(Flags(), Launched(0, 2, "n0", "7")) is None
    assert meeting(Flags(rdzv_endpoint="a:1", standalone=True), Launched()) is None


def test_the_flags_of_a_launch_script_for_one_machine_need_no_token() -> None:
    """Scripts of MindSpeed-LLM give all five, also for one machine: no other machine can reach its own address."""
    one = Flags(node_rank=0, master_addr="localhost", master_port=6000)

    assert meets_itself(one, 1)
    assert not meets_itself(one, 2)
    assert not meets_itself(msgspec.structs.replace(one, node_rank=1), 1)
    assert meets_itself(msgspec.structs.replace(one, node_rank=None), 1)
    assert not meets_itself(msgspec.structs.replace(one, master_addr="10.0.0.1"), 1)
    assert not meets_itself(msgspec.structs.replace(one, rdzv_endpoint="localhost:1"), 1)


@pytest.mark.parametrize(
    ("flags", "said", "expected"),
    [
        (Flags(rdzv_endpoint="m0"), Launched(), Point("m0", 29400, None, None, 600.0, "")),
        (Flags(rdzv_endpoint="m0:5", rdzv_id="j"), Launched(), Point("m0", 5, "j", None, 600.0, "")),
        (Flags(rdzv_endpoint="[::1]:5", node_rank=0), Launched(), Point("::1", 5, None, True, 600.0, "")),
        (Flags(rdzv_endpoint="m0", node_rank=3), Launched(0), Point("m0", 29400, None, False, 600.0, "")),
        (Flags(master_addr="m0"), Launched(), Point("m0", 29500, None, None, 600.0, "")),
        (Flags(master_addr="::1", master_port=7), Launched(), Point("::1", 7, None, None, 600.0, "")),
        (
            Flags(rdzv_endpoint="m0", rdzv_conf={"is_host": "0", "join_timeout": "9"}, local_addr="h"),
            Launched(0),
            Point("m0", 29400, None, False, 9.0, "h"),
        ),
        (Flags("m", rdzv_conf={"is_host": "1"}, node_rank=2), Launched(), Point("m", 29400, None, True, 600.0, "")),
        (Flags(rdzv_endpoint="m0", rdzv_conf={"rank": "0"}), Launched(), Point("m0", 29400, None, True, 600.0, "")),
        (Flags(rdzv_endpoint="auto"), Launched(1, 4, "n3", "77"), Point("n3", 29400, "77", False, 600.0, "")),
        (Flags("m"), Launched(signals_all=True), Point("m", 29400, None, None, 600.0, "", signals_all=True)),
        (Flags("auto:5", rdzv_id="j"), Launched(0, 4, "n3", "77"), Point("n3", 5, "j", True, 600.0, "")),
        (Flags(rdzv_endpoint="m0", rdzv_id="none"), Launched(0, 2), Point("m0", 29400, None, True, 600.0, "")),
    ],
)  # fmt: skip
def test_where_machines_meet_and_who_runs_the_controller(flags: Flags, said: Launched, expected: Point) -> None:
    assert meeting(flags, said) == expected


@pytest.mark.parametrize(
    "flags",
    [
        Flags(rdzv_endpoint="auto"),
        Flags(rdzv_endpoint="m0:port"),
        Flags(rdzv_endpoint="m0", rdzv_conf={"is_host": "perhaps"}),
        Flags(rdzv_endpoint="m0", rdzv_conf={"join_timeout": "-1"}),
        Flags(rdzv_endpoint="m0", rdzv_conf={"rank": "first"}),
    ],
)
def test_a_meeting_that_makes_no_sense_is_refused(flags: Flags) -> None:
    with pytest.raises(ConfigurationError, match="write"):
        meeting(flags, Launched())


# --- what launchers say -----------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[003-004]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
IN_A_BATCH_SCRIPT = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launched()),
        (IN_A_BATCH_SCRIPT, Launched()),  # not started by srun
        (SLURM, Launched(1, 2, "n003", "77", signals_all=True)),
        # two on each machine: which is not said
        ({**SLURM, "SLURM_NTASKS": "4"}, Launched(None, 2, "n003", "77", signals_all=True)),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, Launched(1, 2, "n003", "77-2", signals_all=True)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Launched(1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Launched()),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, Launched(0, 3)),
        ({"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, Launched()),
        ({"PMI_RANK": "x"}, Launched()),
    ],
)
def test_what_a_launcher_says_is_read(environment: dict[str, str], expected: Launched) -> None:
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n[003-008,12],m1", "n003"),
        ("n[7],m", "n7"),
        ("a,b", "a"),
        ("gpu-a-[1-2]", "gpu-a-1"),
        ("", None),
    ],
)
def test_the_first_host_of_a_list_of_slurm(hosts: str, first: str | None) -> None:
    assert first_host(hosts) == first


# --- endpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h", ("h", 29400)),
        ("h:1", ("h", 1)),
        ("tcp://h:1", ("h", 1)),
        ("1.2.3.4:65535", ("1.2.3.4", 65535)),
        ("[fd00::2]:5", ("fd00::2", 5)),
        ("fd00::2", ("fd00::2", 29400)),
        ("[fd00::2]", ("fd00::2", 29400)),
    ],
)
def test_endpoints_are_written_with_names_and_addresses_of_both_kinds(text: str, expected: tuple[str, int]) -> None:
    assert split(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "h:0", "h:65536", "h:x", "h:-1", "h..local:1", f"{64 * 'h'}:1"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        split(text)


def test_several_endpoints_are_written_with_commas() -> None:
    assert endpoints("a:1,[::1]:2,a:1") == ("tcp://a:1", "tcp://[::1]:2")


def test_loopback_is_known_by_all_its_names() -> None:
    assert is_loopback("127.0.0.2")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("192.0.2.1")
    assert not is_loopback("no-such-host.invalid")
    assert not is_loopback("h..local")


def test_a_host_is_this_machine_if_one_of_its_addresses_is() -> None:
    assert is_own("192.0.2.7", ("127.0.0.1", "192.0.2.7"))
    assert is_own("127.0.0.9", ())
    assert is_own("fd00:0:0::2", ("fd00::2",))
    assert not is_own("192.0.2.8", ("127.0.0.1", "192.0.2.7"))
    assert not is_own("no-such-host.invalid", ("127.0.0.1",))


def test_a_controller_listens_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's own name means loopback in Debian's /etc/hosts, and others reach it by another address."""
    names = {"me": ("127.0.1.1",), "vip": ("198.51.100.1",), "localhost": ("127.0.0.1",)}
    monkeypatch.setattr(here, "resolved", lambda host: names.get(host, (host,)))
    monkeypatch.setattr(here, "own_addresses", lambda: ("127.0.0.1", "192.0.2.7"))

    assert listening_at("192.0.2.7", 5) == "tcp://192.0.2.7:5"
    assert listening_at("localhost", 5) == "tcp://localhost:5"
    assert listening_at("me", 5) == "tcp://0.0.0.0:5"
    assert listening_at("vip", 5) == "tcp://0.0.0.0:5"


def test_the_own_address_is_the_one_towards_the_controller() -> None:
    assert address_towards("127.0.0.1", 5) == "127.0.0.1"
    with pytest.raises(ConfigurationError, match="is not known"):
        address_towards("no-such-host.invalid", 5)


def test_one_process_of_a_machine_claims_an_endpoint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert EndpointClaim.take(f"tcp://127.0.0.1:{port}") is None  # somebody listens there
    endpoint = f"tcp://127.0.0.1:{port}"
    claim = EndpointClaim.take(endpoint)
    assert claim is not None
    assert EndpointClaim.take(endpoint) is None
    claim.close()
    again = EndpointClaim.take(endpoint)
    assert again is not None
    again.close()


# --- opening a job ----------------------------------------------------------------------------------------------------


def test_listening_beyond_this_machine_needs_a_token() -> None:
    require_loopback("tcp://127.0.0.1:0")
    require_loopback("tcp://[::1]:5")
    for listen in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://[::]:1", "tcp://192.0.2.1:1"):
        with pytest.raises(ConfigurationError, match="Give the job's token"):
            require_loopback(listen)


def test_a_job_is_not_begun_with_an_expired_token_nor_without_one() -> None:
    require_unexpired(new_token())
    with pytest.raises(ConfigurationError, match="expired at 1970"):
        require_unexpired(FullToken(secrets.token_bytes(32), expires_s=1))
    with pytest.raises(ConfigurationError, match="midstep token"):
        required(None)


def test_a_controller_keeps_the_token_that_the_job_was_begun_with(tmp_path: Path) -> None:
    token = new_token()
    let_nodes_join(tmp_path / "keys", token, "j")
    let_nodes_join(tmp_path / "keys", FullToken(token.secret, expires_s=1), "j")  # expired: no more nodes, and no end

    with pytest.raises(ConfigurationError, match="keys of another token"):
        let_nodes_join(tmp_path / "keys", new_token(), "j")
