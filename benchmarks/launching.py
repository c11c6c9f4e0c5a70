"""Runs a job under midstep, torchrun or torchft, ends it whatever happens, and says how busy the machine was before."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from midstep.devices.kinds import CPU, device_kind

LISTEN_S = 0.5
END_S = 15.0
TAIL_LINES = 15
NODES = 2
LOCAL_HOST = "127.0.0.1"
REPLICA = "REPLICA_GROUP_ID"  # torchft's; the rank of a group of one
# torchft as by somebody who knows it: as it comes, a lost rank is waited for for 60 s.
QUICK_LIGHTHOUSE = ("--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "5000", "--quorum_tick_ms", "20")
DEVICE = "MIDSTEP_BENCH_DEVICE"  # what a script trains on, if not the CPU


class JobFailed(Exception):
    """A job under measurement did not end well."""


def end_jobs_on_sigterm() -> None:
    """Let a benchmark that is told to end take its job and its files along."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def progress(console: Console) -> Progress:
    """Return a bar of what was run so far, which shows on a terminal only: a file keeps the lines of results."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal)


def foreign_cores() -> float:
    """Return how many cores others use while nothing of ours runs."""
    return float(psutil.cpu_percent(LISTEN_S) / 100 * (psutil.cpu_count() or 1))


def midstep(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    job_directory: Path,
    limit_s: float,
    policy: Path | None = None,
    spares: int = 0,
    environment: dict[str, str] | None = None,
    device: str = CPU,
) -> None:
    """Run a script on two nodes of this machine under `midstep run`, and some to spare. Raises JobFailed."""
    nodes = NODES if ranks % NODES == 0 else 1
    flags = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks // nodes), "--job-dir", str(job_directory)]
    flags += [] if policy is None else ["--policy", str(policy)]
    flags += ["--spares", str(spares)] if spares else []
    flags += ["--device", device] if device != CPU else []
    command = [sys.executable, "-m", "midstep.cli.main", "run", *flags, _beside(script), *arguments]
    _run(command, limit_s, {**_variables(device), **(environment or {})})


def torchrun(
    script: str, arguments: Sequence[str], *, ranks: int, max_restarts: int, limit_s: float, device: str = CPU
) -> None:
    """Run a script under torchrun. Raises JobFailed."""
    flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    # Without the first variable torchrun of torch 2.13 gives restarted ranks the addresses of the dead ones.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", **_variables(device)}
    _run([sys.executable, "-m", "torch.distributed.run", *flags, _beside(script), *arguments], limit_s, environment)


def torchft(script: str, arguments: Sequence[str], *, ranks: int, limit_s: float, device: str = CPU) -> None:
    """Run a script under torchft: every rank is a replica group with a torchrun of its own. Raises JobFailed."""
    with socket.create_server((LOCAL_HOST, 0)) as probe:
        address = f"{LOCAL_HOST}:{probe.getsockname()[1]}"
    lighthouse = [_beside_python("torchft_lighthouse"), "--bind", address, "--min_replicas", str(ranks)]
    shared = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "NUM_REPLICA_GROUPS": str(ranks), "OMP_NUM_THREADS": "1"}
    flags = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "10", "--monitor-interval", "0.05"]
    group = [sys.executable, "-m", "torch.distributed.run", *flags, _beside(script), *arguments]
    started: list[subprocess.Popen[str]] = []
    ends_s = time.monotonic() + limit_s
    with tempfile.TemporaryFile("w+") as output:  # not a pipe: it is read when all is over
        try:
            started.append(_started([*lighthouse, *QUICK_LIGHTHOUSE], {}, output))
            for replica in range(ranks):
                environment = {**shared, **_variables(device), REPLICA: str(replica)}
                started.append(_started(group, environment, output))
            for process in started[1:]:
                code = process.wait(max(0.0, ends_s - time.monotonic()))
                if code != 0:
                    raise JobFailed(f"torchft: exit code {code}\n{_tail_of(output)}")
        except subprocess.TimeoutExpired:
            raise JobFailed(f"torchft: not done in {limit_s:g} s\n{_tail_of(output)}") from None
        finally:
            for process in started:
                end(process)


def _tail_of(file: TextIO) -> str:
    file.seek(0)
    return _tail(file.read())


def _beside_python(program: str) -> str:
    """Return the path of a program that was installed with Python's packages."""
    return shutil.which(program) or str(Path(sys.executable).parent / program)


def _variables(device: str) -> dict[str, str]:
    """Return what has a script train on `device`, and ranks share the GPUs of this machine."""
    shared = device_kind(device).shared_with
    return {} if shared is None else {shared: "1", DEVICE: device}


def _beside(script: str) -> str:
    return str(Path(__file__).parent / script)


def _run(command: list[str], limit_s: float, environment: Mapping[str, str]) -> None:
    process = _started(command, environment, subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        output = end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise JobFailed(f"{_name(command)}: not done in {limit_s:g} s\n{_tail(output)}") from None
        raise
    if process.returncode != 0:
        raise JobFailed(f"{_name(command)}: exit code {process.returncode}\n{_tail(output)}")


def _started(command: list[str], environment: Mapping[str, str], output: TextIO | int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
        text=True,
        errors="replace",
    )


def end(process: "subprocess.Popen[str]") -> str:
    """End a launcher as an operator would, so that it clears its job away; then, if need be, at once."""
    descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    output = None
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            output, _ = process.communicate(timeout=END_S)
            break
        except subprocess.TimeoutExpired:
            continue
    for child in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    return output or ""


def _name(command: list[str]) -> str:
    return "midstep" if "midstep.cli.main" in command else "torchrun"


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-TAIL_LINES:])
