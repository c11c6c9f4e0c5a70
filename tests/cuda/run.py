"""midstep on real GPUs: `make test SUITE=cuda`, or `python -m tests.cuda.run [PART ...]`.

Ranks share the GPUs of this machine where there are too few, so one is enough. Each part is a job or two, really
killed, and a row of the table at the end. Exit code 1 if any part is not as it should be.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from midstep.benchmarks import launching, records
from midstep.cli.demo import WIDTH, DemoRun, Scenario, cuda_run, megatron_scenarios, perform
from midstep.cli.display.terminal import Terminal
from midstep.cli.report import load_status
from midstep.communicators.nccl import SHARED_GPU, nccl_version
from midstep.devices.kinds import CUDA
from midstep.processor.tensor_hash import device_hashes
from midstep.protocol.faults import ArmedFault, FaultAction, InjectionPoint
from midstep.protocol.types import Rung

HERE = Path(__file__).parent
STEPS = 60
FAULT_STEPS = 90
MEGATRON_STEPS = 16
SHARDED_STEPS = 30
NEWEST = hasattr(torch.distributed.ProcessGroup, "reduce_scatter_single")  # torch 2.13 calls it so
REDUCE_SCATTER = "reduce_scatter_single" if NEWEST else "_reduce_scatter_base"
RECOVERIES = int(os.environ.get("MIDSTEP_CUDA_RECOVERIES", "30"))
TURNS = int(os.environ.get("MIDSTEP_CUDA_TURNS", "3"))
RECOVERY = os.environ.get("MIDSTEP_CUDA_RECOVERY", "--ranks 2,4 --repeat 3").split()
LIMIT_S = 240.0
HASHED_BYTES = 1 << 30
MOST_FOR_A_HASH_BYTES = 64 << 20
MEMORY_SLACK_BYTES = 64 << 20  # of the survivor, from the third recovery to the last


class Result(NamedTuple):
    """A row of the table: whether all was well, and what there is to say."""

    good: bool
    said: str


def doctor(_: Path) -> Result:
    """Look at what is here."""
    command = [sys.executable, "-m", "midstep.cli.main", "doctor", "--look-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    print(done.stdout)
    return Result(done.returncode == 0, f"exit code {done.returncode}")


def demo(folder: Path) -> Result:
    """The four faults of the demo and a lost context, bits compared."""
    return _compared(cuda_run(STEPS), folder, STEPS)


def faults(folder: Path) -> Result:
    """A kill at each place of a step, SIGSTOP, a lost context, and a second fault in a recovery; bits compared."""

    def scenario(title: str, step: int, rank: int, action: FaultAction, *, at: InjectionPoint, life: int) -> Scenario:
        return Scenario(title, ArmedFault(rank, action, at, step, life), Rung.RECOVER_IN_PLACE)

    kill, lose = FaultAction.KILL, FaultAction.TASK_QUEUE_DEAD
    two = Scenario(
        "kill -9 of rank 2 in its backward pass, and of rank 3 while groups are rebuilt",
        ArmedFault(2, kill, InjectionPoint.BACKWARD, 70, 2),
        Rung.RECOVER_IN_PLACE,
        ArmedFault(3, kill, InjectionPoint.REBUILD, 70, 2),
    )
    plan = (
        scenario("kill -9 of rank 0 in its forward pass", 10, 0, kill, at=InjectionPoint.FORWARD, life=1),
        scenario("kill -9 of rank 1 in its backward pass", 20, 1, kill, at=InjectionPoint.BACKWARD, life=1),
        scenario("kill -9 of rank 2 in a collective", 30, 2, kill, at=InjectionPoint.COLLECTIVE, life=1),
        scenario("kill -9 of rank 3 in its update", 40, 3, kill, at=InjectionPoint.UPDATE, life=1),
        scenario("SIGSTOP of rank 0", 50, 0, FaultAction.STOP, at=InjectionPoint.FORWARD, life=2),
        scenario("an illegal memory access in rank 1", 60, 1, lose, at=InjectionPoint.FORWARD, life=2),
        two,
    )
    base = cuda_run(FAULT_STEPS)
    return _compared(msgspec.structs.replace(base, scenarios=plan), folder, FAULT_STEPS)


def megatron(folder: Path) -> Result:
    """Run megatron-core, tensor parallel 2 x data parallel 2, with two kills and a second one in each recovery."""
    base = cuda_run(FAULT_STEPS)
    run = DemoRun(
        megatron_scenarios(MEGATRON_STEPS),
        spares=0,
        device=CUDA,
        policy="demo-megatron.yaml",
        script="megatron/train_and_record.py",
        communicator=base.communicator,
        environment=base.environment,
    )
    return _compared(run, folder, MEGATRON_STEPS)


def sharded(folder: Path) -> Result:
    """Two rows of two ranks under `fully_shard`, bf16, two micro-batches; a rank lost at each place of a step."""

    def scenario(title: str, step: int, rank: int, at: InjectionPoint, operation: str = "") -> Scenario:
        fault = ArmedFault(rank, FaultAction.KILL, at, step, 1, operation=operation)
        return Scenario(title, fault, Rung.RECOVER_IN_PLACE)

    plan = (
        scenario("kill -9 of rank 1 in its forward pass", 6, 1, InjectionPoint.FORWARD),
        scenario("kill -9 of rank 3 in a reduce-scatter", 12, 3, InjectionPoint.COLLECTIVE, REDUCE_SCATTER),
        scenario("kill -9 of rank 0 in its backward pass", 18, 0, InjectionPoint.BACKWARD),
        scenario("kill -9 of rank 2 in its update", 24, 2, InjectionPoint.UPDATE),
    )
    return _compared(sharded_run(plan, cuda_run(SHARDED_STEPS)), folder, SHARDED_STEPS)


def copies(folder: Path) -> Result:
    """One row of four ranks: no rank holds what another does, and lost ones come back from copies in host memory."""
    return _compared(copies_run(cuda_run(SHARDED_STEPS)), folder, SHARDED_STEPS)


def copies_run(base: DemoRun) -> DemoRun:
    """Return the sharded job without replicas on the devices of `base`; it loses one rank, then two."""

    def kill(rank: int, at: InjectionPoint, step: int) -> ArmedFault:
        return ArmedFault(rank, FaultAction.KILL, at, step, 1)

    pair = (kill(2, InjectionPoint.BACKWARD, 20), kill(3, InjectionPoint.BACKWARD, 20))
    plan = (
        Scenario("kill -9 of rank 1 in its backward pass", kill(1, InjectionPoint.BACKWARD, 10), Rung.RECOVER_IN_PLACE),
        Scenario("kill -9 of ranks 2 and 3 in their backward pass", pair[0], Rung.RECOVER_IN_PLACE, pair[1]),
    )
    run = sharded_run(plan, base)
    environment = {**run.environment, "MIDSTEP_CUDA_ROWS": "1"}
    return msgspec.structs.replace(run, policy=str(HERE / "copies.yaml"), environment=environment)


def sharded_run(plan: tuple[Scenario, ...], base: DemoRun) -> DemoRun:
    """Return the sharded job on the devices of `base`, under these faults."""
    return msgspec.structs.replace(base, scenarios=plan, spares=0, script=str(HERE / "sharded_job.py"))


def _compared(run: DemoRun, folder: Path, steps: int) -> Result:
    began_s = time.monotonic()
    problems = perform(run, folder, steps, folder / "result.json", Terminal(width=WIDTH))
    for problem in problems[:20]:
        print("not as it should be:", problem)
    incidents = json.loads((folder / "result.json").read_text())["incidents"]
    took = ", ".join(f"{incident['recovery_s'] or 0:.2f}" for incident in incidents)
    return Result(
        not problems,
        f"{len(incidents)} incidents in {time.monotonic() - began_s:.0f} s ({took} s each), "
        f"{'bits equal' if not problems else f'{len(problems)} problems'}",
    )


def endurance(folder: Path) -> Result:
    """Rank 1 is killed again and again: every time it comes back, and the survivor's memory stays what it was."""
    job = folder / "job"
    done = _run_job(job, HERE / "endurance_job.py", [str(folder), str(RECOVERIES)], policy=HERE / "endurance.yaml")
    notes = [json.loads(line) for line in (folder / "survivor.jsonl").read_text().splitlines()]
    incidents = load_status(job).incidents
    opened = {name: count - notes[2]["open"].get(name, 0) for name, count in notes[-1]["open"].items()}
    print("more files open at the end:", {name: count for name, count in opened.items() if count > 0})
    used = [note["allocated_bytes"] + note["outside_bytes"] for note in notes]
    spread = ", ".join(f"{notes[2][name]} to {notes[-1][name]} {name}" for name in ("threads", "descriptors"))
    flat = max(used[3:]) - used[2] <= MEMORY_SLACK_BYTES and notes[-1]["threads"] <= notes[2]["threads"] + 2
    kept = len({note["pid"] for note in notes}) == 1
    good = done.returncode == 0 and len(incidents) == RECOVERIES and flat and kept
    times_s = [note["recovered_s"] for note in notes if note["recovered_s"]]
    return Result(
        good,
        f"{len(incidents)} recoveries, memory of the survivor {used[2] >> 20} to {used[-1] >> 20} MiB "
        f"(most {max(used) >> 20}), {spread}, median {statistics.median(times_s):.2f} s from kill to next step",
    )


def step_time(folder: Path) -> Result:
    """Steps without faults: midstep beside plain DDP under torchrun, by turns."""
    ours_s: list[float] = []
    theirs_s: list[float] = []
    for turn in range(TURNS):
        for name, times_s in (("midstep", ours_s), ("torchrun", theirs_s)):
            notes = folder / f"{name}-{turn}"
            notes.mkdir()
            arguments, script = [str(notes), "150", "-1"], "recovery_job.py"
            if name == "midstep":
                job = notes / "job"
                launching.midstep(script, arguments, ranks=2, job_directory=job, limit_s=LIMIT_S, device=CUDA)
            else:
                launching.torchrun(script, arguments, ranks=2, max_restarts=0, limit_s=LIMIT_S, device=CUDA)
            times_s.append(_median_step_s(records.read_lives(notes)))
    ratios = [one / other for one, other in zip(ours_s, theirs_s, strict=True)]
    return Result(
        True,
        f"midstep {_ms(ours_s)} ms, torchrun {_ms(theirs_s)} ms, "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
    )


def recovery(folder: Path) -> Result:
    """A kill beside torchrun on the same card: `benchmarks/recovery.py --device cuda`."""
    command = [sys.executable, "-m", "midstep.benchmarks.recovery", "--device", CUDA]
    command += [*RECOVERY, "--steps", "20", "--json", str(folder / "recovery.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    print(done.stdout, done.stderr[-3000:])
    if done.returncode != 0:
        return Result(False, f"exit code {done.returncode}")
    result = json.loads((folder / "recovery.json").read_text())
    _keep(folder / "recovery.json")
    ratios = ", ".join(f"{ranks} ranks {ratio:.3f}" for ranks, ratio in result["excess_ratio"].items())
    return Result(True, f"midstep's excess over torchrun's: {ratios}")


def transport(_: Path) -> Result:
    """A plain copy on the device, to compare repairs with."""
    source = torch.empty(126_000_000, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began_s = time.monotonic()
    for _turn in range(20):
        target.copy_(source)
    torch.cuda.synchronize()
    return Result(True, f"{20 * len(source) / (time.monotonic() - began_s) / 1e9:.0f} GB/s for 126 MB, one process")


def hashes(_: Path) -> Result:
    """Hashes of votes: the same on the card as on the CPU, wherever tensors lie; how fast, and in how much memory."""
    cpu, card = torch.device("cpu"), torch.device(CUDA)
    on_host = [torch.arange(3_000_000), torch.tensor(3.0), torch.arange(7).to(torch.bfloat16)]
    on_host.append(torch.arange(20_000_001).to(torch.uint8)[1:])
    on_card = [tensor.to(card) for tensor in on_host]
    groups = [on_host, on_card, [on_card[0], *on_host[1:3], on_card[3]]]
    found = {number for place in (cpu, card) for number in device_hashes(groups, place)}
    large = torch.arange(HASHED_BYTES // 8, device=card)
    device_hashes([[large]], card)
    torch.cuda.reset_peak_memory_stats()
    before, began_s = torch.cuda.memory_allocated(), time.monotonic()
    for _turn in range(10):
        device_hashes([[large]], card)
    rate = 10 * HASHED_BYTES / (time.monotonic() - began_s) / 1e9
    more_bytes = torch.cuda.max_memory_allocated() - before
    good = len(found) == 1 and more_bytes <= MOST_FOR_A_HASH_BYTES
    return Result(good, f"{len(found)} hashes of equal tensors, {rate:.0f} GB/s, {more_bytes >> 20} MiB of memory")


PARTS: dict[str, Callable[[Path], Result]] = {
    each.__name__: each
    for each in (doctor, demo, faults, megatron, sharded, copies, endurance, step_time, transport, hashes, recovery)
}


def _run_job(job: Path, script: Path, arguments: list[str], *, policy: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "midstep.cli.main", "run", "--device", CUDA, "--policy", str(policy)]
    command += ["--nproc-per-node", "2", "--job-dir", str(job), str(script), *arguments]
    environment = {**os.environ, SHARED_GPU: "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    if done.returncode != 0:
        print(done.stdout[-3000:], done.stderr[-3000:])
    return done


def _median_step_s(lives: list[records.Life]) -> float:
    ends = [at_s for _, at_s in next(life.steps for life in lives if life.rank == 0)][20:]
    return statistics.median(later - earlier for earlier, later in pairwise(ends))


def _ms(times_s: list[float]) -> str:
    return f"{1000 * statistics.median(times_s):.2f}"


def _keep(path: Path) -> None:
    """Copy a file to where MIDSTEP_CUDA_OUT says, if it is set."""
    out = os.environ.get("MIDSTEP_CUDA_OUT")
    if out:
        (Path(out) / path.name).write_bytes(path.read_bytes())


def main(names: list[str]) -> int:
    """Run the parts of these names, or all; print the table."""
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no GPU here")
        return 0
    card = torch.cuda.get_device_name(0)
    version = ".".join(str(part) for part in nccl_version())
    title = f"{torch.cuda.device_count()} x {card}, torch {torch.__version__}, NCCL {version}"
    table = Table("part", "", "seconds", "what came of it", title=title, title_justify="left")
    bad = False
    for name in names or PARTS:
        print(f"=== {name}", flush=True)
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="midstep-cuda-") as folder:
            try:
                result = PARTS[name](Path(folder))
            except Exception as error:  # of a job that did not end well: the other parts are run all the same
                result = Result(False, f"{type(error).__name__}: {error}"[:500])
            if not result.good:
                _show_logs(Path(folder))
        bad = bad or not result.good
        table.add_row(name, "ok" if result.good else "NOT OK", f"{time.monotonic() - began_s:.0f}", result.said)
        print(f"=== {name}: {'ok' if result.good else 'NOT OK'}: {result.said}", flush=True)
    Console(width=140).print(table)
    return 1 if bad else 0


def _show_logs(folder: Path) -> None:
    """Print the ends of the logs of a job that went wrong."""
    for path in sorted(folder.rglob("logs/*.log"))[:40]:
        text = path.read_text(errors="replace")
        print(f"--- {path.relative_to(folder)}", *text.splitlines()[-25:], sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
