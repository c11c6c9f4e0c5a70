"""Real jobs, as a user starts them: `midstep run` in a process of its own, watched and hurt from outside."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.controller.endpoints.control_requests import Accepted, KillNodeRequest, Request, StatusReply, StatusRequest
from midstep.controller.endpoints.local_sockets import NoController, ask
from midstep.launch.supervisor import read_notice
from midstep.protocol import environment as names
from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

TRAINING = Path(__file__).with_name("training.py")
MARK = "MIDSTEP_CHAOS_MARK"  # every process of a job carries it
PATIENCE_S = 90.0  # for anything that has to happen; the machine may be busy
OF_TORCH = "_remote_module_non_scriptable.py"
GONE_S = 20.0  # for the last process to be gone after the launcher
ANSWER_S = 20.0  # for the controller to answer a request
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.3  # between two looks at a job: each costs its controller some time
STATUS_S = 1.0  # for a status, which is asked for again and again, also of controllers that are dead
STEPS = 60
STEP_S = 0.03
RANKS = 4
ONE_NODE = {"nodes": 1, "ranks_per_node": RANKS}  # up with half the imports, for what is not about nodes

# Room for many recoveries, and for a busy machine: only real stalls are to be seen as such. A process that stops itself
# holds a recovery in its phase, until the test has it go on.
ROOMY: dict[str, Any] = {
    "ladder": [
        {"rung": "retry_step", "attempts": 8, "budget": {"per_job": 1000}},
        {"rung": "recover_in_place", "attempts": 8, "budget": {"per_job": 1000}},
        {"rung": "recover", "attempts": 3, "budget": {"per_job": 10}},
        {"rung": "reschedule_pod", "attempts": 2, "budget": {"per_job": 5}},
        {"rung": "stop"},
    ],
    "checkpoint": {"every_steps": 10},
    "stall": {"grace_s": 3.0, "suspended_s": PATIENCE_S},
    "heartbeat": {"missed": 20},
    "incident": {"max_attempts": 20},
    "node": {"failures": None},
    "deadlines": {"stop_grace_s": 2.0},
}


def inject(
    rank: int, point: InjectionPoint, step: int | None, *, life: int = 1, action: FaultAction = FaultAction.KILL
) -> ArmedFault:
    """Return a fault for one life (incarnation) of a rank; kills it by default."""
    return ArmedFault(rank, action, point, step, life)


class Record(msgspec.Struct, frozen=True):
    """What the ranks wrote down: loss and parameters of each step, as often as it was done, and how they ended."""

    steps: dict[int, dict[int, set[tuple[str, str]]]]
    ends: dict[int, dict[str, Any]]


def read_record(directory: Path) -> Record:
    """Read what the ranks wrote into a directory; a line that one is just writing is left out."""
    steps: dict[int, dict[int, set[tuple[str, str]]]] = {}
    for path in directory.glob("steps.*"):
        rank = int(path.suffix[1:])
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            index, loss, parameters = line.split()
            steps.setdefault(rank, {}).setdefault(int(index), set()).add((loss, parameters))
    ends = {int(path.name.split(".")[1]): json.loads(path.read_text()) for path in directory.glob("end.*.json")}
    return Record(steps, ends)


class Job:
    """One job, from `midstep run` until nothing is left of it."""

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 2,
        ranks_per_node: int = 2,
        spares: int = 0,
        policy: dict[str, Any] | None = None,
        faults: Iterable[ArmedFault] = (),
        script: Path | str = TRAINING,
        arguments: Sequence[str] | None = None,
        more_arguments: Sequence[str] = (),
        steps: int = STEPS,
        step_s: float = STEP_S,
        file_limit_bytes: int | None = None,
        options: Sequence[str] = (),
        gates: Sequence[int] = (),
        device: str = "cpu",
        fixed_nodes: bool = True,  # each node that is added, also a spare in the place of a used one, imports torch
    ) -> None:
        self.name = f"chaos-{secrets.token_hex(4)}"
        self.directory, self.records = root / "job", root / "records"
        self.temporary = root / "tmp"
        for made in (root, self.records, self.temporary):
            made.mkdir(exist_ok=True)
        for step in gates:
            self.close_gate(step)
        self._policy = root / "policy.yaml"
        chosen = ROOMY if policy is None else policy
        if gates:
            # To be held at a gate is no stall.
            chosen = {**chosen, "stall": {"grace_s": PATIENCE_S, "suspended_s": PATIENCE_S}}
        self._policy.write_text(yaml.safe_dump(json.loads(json.dumps(chosen))))  # without aliases
        self._shared = _shared_memory()
        self.output = root / "output.txt"
        given = [str(self.records), str(steps), str(step_s)] if arguments is None else list(arguments)
        given += more_arguments
        given += [] if file_limit_bytes is None else [str(file_limit_bytes)]
        environment = {
            **os.environ,
            MARK: self.name,
            names.FAULTS: msgspec.json.encode(list(faults)).decode(),
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),  # made when torch is imported
        }
        shape = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node), "--spares", str(spares)]
        where = ["--job", self.name, "--job-dir", str(self.directory), "--policy", str(self._policy)]
        where += [] if device == "cpu" else ["--device", device]
        where += ["--fixed-nodes"] if fixed_nodes else []
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "midstep.cli.main", "run", *shape, *where, *options, str(script), *given],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # --- watching ---------------------------------------------------------------------------------------------------

    @property
    def run_directory(self) -> Path:
        """Where the job's sockets are while it runs."""
        return Path(json.loads((self.directory / "job.json").read_text())["run_dir"])

    def ask(self, request: Request, limit_s: float = ANSWER_S) -> Any:
        """Ask the controller; None when nobody answers."""
        try:
            return ask(self.run_directory, request, limit_s)
        except (NoController, FileNotFoundError):
            return None

    def status(self) -> JobStatus | None:
        """Return the live status; None while no controller answers."""
        reply = self.ask(StatusRequest(), STATUS_S)
        return reply.status if isinstance(reply, StatusReply) else None

    def until(self, holds: Callable[[JobStatus], bool], what: str, limit_s: float = PATIENCE_S) -> JobStatus:
        """Wait until the job's live status is as wanted, and return it."""
        deadline = time.monotonic() + limit_s
        pause_s = SHORTEST_PAUSE_S
        while True:
            status = self.status()
            if status is not None and holds(status):
                return status
            assert self.launcher.poll() is None, f"the job ended while waiting for {what}:\n{self.said()}"
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{self.said()}"
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def wait(self, limit_s: float = PATIENCE_S) -> int:
        """Wait for the end of the job and return its exit code."""
        try:
            return self.launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {limit_s} s:\n{self.said()}") from None

    def report(self) -> dict[str, Any]:
        """Return what `midstep report --json` says."""
        done = CliRunner().invoke(main, ["report", "--json", str(self.directory)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        report: dict[str, Any] = json.loads(done.stdout)
        time = report["time"]  # of every job, whatever has happened to it
        if time is not None:
            assert abs(sum(time["seconds"].values()) - time["wall_s"]) <= 0.01 * time["wall_s"], time
        return report

    def record(self) -> Record:
        """Return what the ranks wrote down."""
        return read_record(self.records)

    def held_at(self, step: int, limit_s: float = PATIENCE_S) -> JobStatus:
        """Wait until all ranks stand at the gate of a step, with no incident open."""

        def held(status: JobStatus) -> bool:
            return status.phase == "running" and all(rank.step == step for rank in status.ranks)

        return self.until(held, f"all ranks at the gate of step {step}", limit_s)

    def close_gate(self, step: int) -> None:
        """Have the ranks wait in front of a step."""
        self._gate(step).touch()

    def open_gate(self, step: int) -> None:
        """Let the ranks go on into a step."""
        self._gate(step).unlink()

    def kill_node(self, name: str) -> None:
        """Have the platform kill a node, and wait until its loss is known."""
        assert isinstance(self.ask(KillNodeRequest(name)), Accepted)

        def lost(status: JobStatus) -> bool:
            return any((node.node, node.state) == (name, "lost") for node in status.nodes)

        self.until(lost, f"the loss of {name}")

    def controller_pid(self) -> int:
        """Return the process id of the controller that was started last."""
        notice = read_notice(self.run_directory)
        assert notice is not None
        return notice.pid

    def processes(self) -> list[psutil.Process]:
        """Return every process that belongs to the job, wherever it has got to."""
        return [process for process in psutil.process_iter() if _environment(process).get(MARK) == self.name]

    def rank_process(self, rank: int) -> psutil.Process:
        """Return the process that holds a rank now."""
        status = self.status()
        assert status is not None
        return psutil.Process(status.ranks[rank].pid)

    def said(self) -> str:
        """Return everything that the job has printed, for messages of failed tests."""
        logs = [self.output, *sorted(self.directory.glob("logs/*"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in logs if log.is_file())

    def _gate(self, step: int) -> Path:
        return self.records / f"gate.{step}"

    # --- the end ----------------------------------------------------------------------------------------------------

    def assert_nothing_left(self) -> None:
        """No process, socket, shared memory or temporary file has outlived the launcher."""
        deadline = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind: {[(each.pid, _command(each)) for each in left]}\n{self.said()}"
        place = self.run_directory
        while place.exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # another test's launcher found it abandoned, ended the agents, and is about to remove it
        assert not place.exists(), f"{place} is left behind: {sorted(map(str, place.rglob('*')))}"
        while (shared := _unused(_shared_memory() - self._shared)) and time.monotonic() < deadline:
            time.sleep(0.05)  # another job's, that is being made or cleared away
        assert not shared, f"shared memory left behind: {shared}"
        # torch 2.7 makes a folder in each process that imports torch.distributed.nn: killed ones leave it.
        temporary = [place for place in self.temporary.iterdir() if not (place / OF_TORCH).is_file()]
        assert not temporary, f"temporary files left behind: {temporary}"

    def close(self) -> None:
        """Kill whatever is there, for tests that failed."""
        self.launcher.kill()
        self.launcher.wait(10)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _environment(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return "gone"


def _shared_memory() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if path.is_file()}


def _unused(paths: set[Path]) -> set[Path]:
    """Return those that no living process has mapped or open: what others are using is not ours."""
    unused = {path for path in paths if path.exists()}
    for process in psutil.process_iter():
        if not unused:  # to ask all processes of a machine takes a while
            break
        with contextlib.suppress(psutil.Error):
            unused -= {Path(path) for path in _held(process)}
    return {path for path in unused if path.exists()}


def _held(process: psutil.Process) -> Iterator[str]:
    yield from (mapped.path for mapped in process.memory_maps())
    yield from (opened.path for opened in process.open_files())
