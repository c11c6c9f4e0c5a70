"""Runs a job under midstep or under torchrun, ends it whatever happens, and says how busy the machine was before."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from midstep.devices.kinds import CPU, device_kind

LISTEN_S = 0.5
END_S = 15.0
TAIL_LINES = 15
NODES = 2
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


def _variables(device: str) -> dict[str, str]:
    """Return what has a script train on `device`, and ranks share the GPUs of this machine."""
    shared = device_kind(device).shared_with
    return {} if shared is None else {shared: "1", DEVICE: device}


def _beside(script: str) -> str:
    return str(Path(__file__).parent / script)


def _run(command: list[str], limit_s: float, environment: dict[str, str] | None = None) -> None:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        output = end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise JobFailed(f"{_name(command)}: not done in {limit_s:g} s\n{_tail(output)}") from None
        raise
    if process.returncode != 0:
        raise JobFailed(f"{_name(command)}: exit code {process.returncode}\n{_tail(output)}")


def end(process: "subprocess.Popen[str]") -> str:
    """End a launcher as an operator would, so that it clears its job away; then, if need be, at once."""
    descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            output, _ = process.communicate(timeout=END_S)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        output = ""
    for child in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    return output


def _name(command: list[str]) -> str:
    return "midstep" if "midstep.cli.main" in command else "torchrun"


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-TAIL_LINES:])
