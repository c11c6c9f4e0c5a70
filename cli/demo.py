"""`midstep demo`: a training job on this machine loses processes and a node, and ends as if nothing had happened."""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from ..controller.journal.reading import read_status
from ..devices.kinds import CPU, CUDA, FAKE, GLOO, NPU
from ..launch.job import Start, create_job
from ..protocol import environment as env
from ..protocol.errors import ConfigurationError
from ..protocol.identities import Role
from ..protocol.incidents import JobStatus, Outcome
from ..protocol.own_programs import own_program
from ..protocol.types import ArmedFault, FaultAction, InjectionPoint, Rung
from ..protocol.wording import count
from .display.terminal import Terminal
from .frame import Command
from .numbers import STEPS_OF_DEMO
from .page.beside import ANY_PORT, page_beside, page_option, require_here
from .showing import run_job
from .views.incident_data import incident_json
from .views.report_text import job_view

NODES, RANKS_PER_NODE, SPARES = 2, 2, 1
STEPS, STEPS_OF_TITAN = 100, 30  # torchtitan's are ten times as long
LEAST_RANKS = 2
# What is compared bit for bit has to repeat itself; the training script asks torch for the same.
REPEATABLE = {"HCCL_DETERMINISTIC": "true"}
ASSETS_S = 300.0  # for a tokenizer of 2,000 words, which takes seconds
TITAN = "0.3"  # the release of torchtitan whose arguments the demo gives
WIDTH = 100
PACKAGE = Path(__file__).resolve().parent.parent


class Scenario(msgspec.Struct, frozen=True):
    """A fault of the demo, and what should come of it."""

    title: str
    fault: ArmedFault
    rung: Rung
    meanwhile: ArmedFault | None = None  # comes during the recovery from the first

    @property
    def faults(self) -> tuple[ArmedFault, ...]:
        """Both of them, or the one."""
        return (self.fault,) if self.meanwhile is None else (self.fault, self.meanwhile)


def scenarios(steps: int) -> tuple[Scenario, ...]:
    """Return the four faults, spread over the run. Each is of the first process only that holds its rank."""

    def fault(rank: int, action: FaultAction, point: InjectionPoint, part: float) -> ArmedFault:
        return ArmedFault(rank, action, point, step=int(steps * part), incarnation=1)

    return (
        Scenario(
            "an exception in rank 0", fault(0, FaultAction.RAISE, InjectionPoint.BACKWARD, 0.2), Rung.RECOVER_IN_PLACE
        ),
        Scenario(
            "kill -9 of rank 1", fault(1, FaultAction.KILL, InjectionPoint.COLLECTIVE, 0.4), Rung.RECOVER_IN_PLACE
        ),
        Scenario("SIGSTOP of rank 3", fault(3, FaultAction.STOP, InjectionPoint.FORWARD, 0.6), Rung.RECOVER_IN_PLACE),
        Scenario(
            "the loss of the node of rank 2",
            fault(2, FaultAction.KILL_NODE, InjectionPoint.BACKWARD, 0.8),
            Rung.RECOVER,
        ),
    )


def process_scenarios(steps: int, ranks: int) -> tuple[Scenario, ...]:
    """Return what can happen to a process, in as many ranks as there are, all on one node."""
    lives: Counter[int] = Counter()

    def scenario(title: str, wanted: int, action: FaultAction, point: InjectionPoint, part: float) -> Scenario:
        rank = wanted % ranks
        lives[rank] += 1  # each of these ends one
        fault = ArmedFault(rank, action, point, step=int(steps * part), incarnation=lives[rank])
        return Scenario(title.format(rank=rank), fault, Rung.RECOVER_IN_PLACE)

    return (
        scenario("an exception in rank {rank}", 0, FaultAction.RAISE, InjectionPoint.BACKWARD, 0.2),
        scenario("kill -9 of rank {rank}", 1, FaultAction.KILL, InjectionPoint.COLLECTIVE, 0.4),
        scenario("SIGSTOP of rank {rank}", 3, FaultAction.STOP, InjectionPoint.FORWARD, 0.6),
        scenario("kill -9 of rank {rank} in the update", 2, FaultAction.KILL, InjectionPoint.UPDATE, 0.8),
    )


class DemoRun(msgspec.Struct, frozen=True):
    """A training run, on what, and what happens to it."""

    scenarios: tuple[Scenario, ...]
    nodes: int = NODES
    ranks_per_node: int = RANKS_PER_NODE
    spares: int = SPARES
    device: str = CPU
    policy: str = "demo.yaml"
    script: str = "train_and_record.py"
    needs_assets: bool = False  # a tokenizer and a text, made in a folder that the script is given
    communicator: str | None = None  # instead of the policy's
    environment: dict[str, str] = {}

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node


def npu_run(steps: int) -> DemoRun:
    """Return the demo on Ascend NPUs. A machine with NPUs is one node, so none is lost. Imports torch-npu."""
    try:
        devices = int(import_module("torch_npu").npu.device_count())
    except Exception as error:  # torch-npu without CANN fails in its own ways
        raise ConfigurationError(f"torch_npu cannot be imported: {error}. See `midstep doctor`.") from error
    ranks = min(devices, NODES * RANKS_PER_NODE)
    if ranks < LEAST_RANKS:
        raise ConfigurationError(f"{count(devices, 'NPU')} found here; the demo needs {LEAST_RANKS}.")
    scenarios = process_scenarios(steps, ranks)
    shape: dict[str, Any] = {"nodes": 1, "ranks_per_node": ranks, "spares": 0}
    return DemoRun(scenarios, **shape, device=NPU, policy="npu.yaml", environment=REPEATABLE)


def cuda_run(steps: int) -> DemoRun:
    """Return the demo on NVIDIA GPUs, which its ranks share: with a lost context besides. Imports torch."""
    import torch

    from ..communicators.nccl import SHARED_GPU, SHARED_GPU_FROM, nccl_version

    if not torch.cuda.is_available():
        raise ConfigurationError(f"torch {torch.__version__} finds no GPU here. See `midstep doctor`.")
    lost = ArmedFault(0, FaultAction.TASK_QUEUE_DEAD, InjectionPoint.FORWARD, step=int(steps * 0.3), incarnation=2)
    lost_context = Scenario("an illegal memory access in rank 0", lost, Rung.RECOVER_IN_PLACE)
    return DemoRun(
        by_step(scenarios(steps), (lost_context,)),
        device=CUDA,
        communicator=None if nccl_version()[:2] >= SHARED_GPU_FROM else GLOO,
        environment={SHARED_GPU: "1"},
    )


def device_scenarios(steps: int) -> tuple[Scenario, ...]:
    """Return faults of the device, in between those of `scenarios`; only the fake device can cause them."""

    def fault(rank: int, action: FaultAction, point: InjectionPoint, part: float) -> ArmedFault:
        return ArmedFault(rank, action, point, step=int(steps * part))

    return (
        Scenario(
            "a memory error in rank 2",
            fault(2, FaultAction.MEMORY_PERSISTENT, InjectionPoint.FORWARD, 0.3),
            Rung.RETRY_STEP,
        ),
        Scenario(
            "a broken link of rank 1", fault(1, FaultAction.LINK_DOWN, InjectionPoint.COLLECTIVE, 0.5), Rung.RETRY_STEP
        ),
        Scenario(
            "a collective that hangs",
            fault(0, FaultAction.HANG_COLLECTIVE, InjectionPoint.COLLECTIVE, 0.7),
            Rung.RETRY_STEP,
        ),
    )


def megatron_scenarios(steps: int) -> tuple[Scenario, ...]:
    """Return two kills, each followed by another one in the middle of the recovery from it."""

    def kill(rank: int, point: InjectionPoint, part: float) -> ArmedFault:
        return ArmedFault(rank, FaultAction.KILL, point, step=int(steps * part), incarnation=1)

    return (
        Scenario(
            "kill -9 of rank 1 in its backward pass, and of rank 2 while groups are rebuilt",
            kill(1, InjectionPoint.BACKWARD, 0.3),
            Rung.RECOVER_IN_PLACE,
            kill(2, InjectionPoint.REBUILD, 0.3),
        ),
        Scenario(
            "kill -9 of rank 0 in the gradient reduction, and of rank 3 during the repair",
            kill(0, InjectionPoint.REDUCTION, 0.7),
            Rung.RECOVER_IN_PLACE,
            kill(3, InjectionPoint.REPAIR, 0.7),
        ),
    )


def titan_run(steps: int) -> DemoRun:
    """Return the demo on torchtitan's own program. Raises ConfigurationError for a version that has other arguments."""
    found = version("torchtitan")
    if not found.startswith(f"{TITAN}."):
        raise ConfigurationError(
            f"torchtitan {found} is installed, and the demo gives its program the arguments of {TITAN}: "
            f"pip install 'torchtitan=={TITAN}.*', which takes Python 3.11 or newer"
        )
    script = "torchtitan/train_and_record.py"
    return DemoRun(scenarios(steps), policy="demo-titan.yaml", script=script, needs_assets=True)


def by_step(*several: tuple[Scenario, ...]) -> tuple[Scenario, ...]:
    """Return all scenarios in the order in which they happen."""
    return tuple(
        sorted((scenario for some in several for scenario in some), key=lambda scenario: scenario.fault.step or 0)
    )


@click.command("demo", cls=Command)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result as JSON.")
@click.option(
    "--steps", type=STEPS_OF_DEMO, help=f"Length of the training.  [default: {STEPS}, with --titan {STEPS_OF_TITAN}]"
)
@click.option(
    "--device",
    type=click.Choice([CPU, CUDA, FAKE, NPU]),
    default=CPU,
    show_default=True,
    help="fake: on a CPU that behaves like an NPU, with three faults of the device besides. cuda: on NVIDIA GPUs, "
    "which the ranks share, with an illegal memory access besides. npu: on Ascend NPUs, one node of up to four ranks, "
    "with a kill in the update instead of the loss of a node.",
)
@click.option("--megatron", is_flag=True, help="Train on megatron-core, tensor parallel 2 x data parallel 2.")
@click.option("--mindspore", is_flag=True, help="Train with MindSpore, data parallel, which needs no torch.")
@click.option("--titan", is_flag=True, help="Run torchtitan's own program and its debug model, HSDP 2 x 2, on the CPU.")
@page_option(without=ANY_PORT)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep journals, logs and records in this directory.  [default: a temporary one, removed]",
)
def command(
    *,
    json_file: Path | None,
    steps: int | None,
    device: str,
    megatron: bool,
    mindspore: bool,
    titan: bool,
    page: str | None,
    keep: Path | None,
) -> None:
    """Train a small GPT on the standard library's source twice, undisturbed and under four faults, and compare.

    Two nodes of two ranks and a spare node, all on this machine. The faults: an exception in rank 0, kill -9 of rank
    1, SIGSTOP of rank 3, and the loss of a whole node. Exit code 0 only if all of it went as it should: four
    incidents, each on the expected rung, every healthy process alive throughout, no committed step lost, and
    parameters, optimizer state, random numbers and losses equal bit for bit.

    With --megatron (which needs megatron-core) the same under two kills, and a second one in each recovery. With
    --mindspore (which needs MindSpore, and no torch) a small classifier under the four faults. With --titan (which
    needs torchtitan 0.3.0) torchtitan's debug model, 6 million parameters, under the four faults.
    """
    for wanted, library in ((megatron, "megatron"), (mindspore, "mindspore"), (titan, "torchtitan")):
        if wanted and find_spec(library) is None:
            raise click.ClickException(f"{library} is not installed: pip install 'midstep[{library}]'")
    if not mindspore and find_spec("torch") is None:
        raise click.ClickException("torch is not installed: pip install 'midstep[torch]', or try --mindspore")
    if megatron and device == NPU:
        raise click.UsageError("--megatron is on the CPU, on GPUs or on the fake device")
    if megatron + mindspore + titan > 1:
        raise click.UsageError("--megatron, --mindspore and --titan are demos of their own: choose one of them")
    if (mindspore or titan) and device != CPU:
        raise click.UsageError(f"--{'titan' if titan else 'mindspore'} is on the CPU")
    require_here(page)
    steps = steps or (STEPS_OF_TITAN if titan else STEPS)
    console = Terminal(width=WIDTH)
    run = titan_run(steps) if titan else _chosen(steps, device, megatron=megatron, mindspore=mindspore)
    if run.communicator is not None:
        console.print(f"this NCCL lets no ranks share a GPU: tensors travel by way of the hosts ({run.communicator})")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        problems = perform(run, keep.absolute(), steps, json_file, console, page=page)
    else:
        with tempfile.TemporaryDirectory(prefix="midstep-demo-") as directory:
            problems = perform(run, Path(directory), steps, json_file, console, page=page)
    if page is None:
        say_how_to_see_it(console)
    sys.exit(1 if say_problems(problems, console) else 0)


def _chosen(steps: int, device: str, *, megatron: bool, mindspore: bool) -> DemoRun:
    """Return the run that the options ask for. Raises ConfigurationError where there is no GPU for it."""
    if megatron:
        script = "megatron/train_and_record.py"
        run = DemoRun(megatron_scenarios(steps), spares=0, device=device, policy="demo-megatron.yaml", script=script)
        if device != CUDA:
            return run
        shared = cuda_run(steps)
        return msgspec.structs.replace(run, communicator=shared.communicator, environment=shared.environment)
    if mindspore:
        script = "mindspore/train_and_record.py"
        return DemoRun(scenarios(steps), policy="demo-mindspore.yaml", script=script)
    if device == CUDA:
        return cuda_run(steps)
    if device == NPU:
        return npu_run(steps)
    return DemoRun(by_step(scenarios(steps), device_scenarios(steps) if device == FAKE else ()), device=device)


def say_how_to_see_it(console: Terminal) -> None:
    """Name the command that shows the same in a browser."""
    first = "" if find_spec("starlette") and find_spec("uvicorn") else "pip install 'midstep[operator]', then "
    said = Text("to see it live in a browser, with buttons: ", style="bold")
    said.append(f"{first}midstep demo --page", style="not bold").append("   (of a job of yours: midstep page)", "dim")
    console.print(said, soft_wrap=True)


def say_problems(problems: list[str], console: Terminal) -> bool:
    """Show what is not as it should be, and tell whether there is anything."""
    for problem in problems:
        console.print(Text("not as it should be: ", style="red").append(problem, style="not red"))
    return bool(problems)


def perform(
    run: DemoRun, directory: Path, steps: int, json_file: Path | None, console: Terminal, *, page: str | None = None
) -> list[str]:
    """Run both jobs, show the outcome, and return what is not as it should be. `page`: where the second has one."""
    plan = run.scenarios
    spare = ", a spare node" if run.spares else ""
    shape = f"{count(run.ranks, 'rank')} on {count(run.nodes, 'node')}{spare}"
    device = "" if run.device == CPU else f", device {run.device}"
    _head(console, f"1. undisturbed: {shape}{device}")
    _train(run, directory, "undisturbed", steps, ())
    _head(console, f"2. the same training, under {count(sum(len(scenario.faults) for scenario in plan), 'fault')}")
    for scenario in plan:
        console.print(f"   step {scenario.fault.step}: {scenario.title}")
    _train(
        run, directory, "disturbed", steps, tuple(fault for scenario in plan for fault in scenario.faults), page=page
    )
    status = read_status(directory / "disturbed" / "job")
    comparison = compare(directory / "undisturbed" / "record", directory / "disturbed" / "record", run.ranks, steps)
    _head(console, "3. what happened")
    console.print(job_view(status, status.incidents, width=WIDTH))
    _head(console, "4. compared with the undisturbed run")
    console.print(_comparison_table(comparison, steps))
    if json_file is not None:
        json_file.write_text(json.dumps(_as_data(status, comparison), indent=2) + "\n")
        console.print(Text(f"as data in {json_file}", style="dim"))
    return _problems(status, comparison, plan)


def _head(console: Terminal, title: str) -> None:
    console.rule(Text(title, style="bold"), align="left")


def _train(
    run: DemoRun, directory: Path, name: str, steps: int, faults: tuple[ArmedFault, ...], *, page: str | None = None
) -> None:
    record = directory / name / "record"
    record.mkdir(parents=True)
    arguments = [str(record), str(steps)]
    if run.needs_assets:
        arguments.append(str(_assets(directory / "assets")))
    start = Start(
        command=(str(PACKAGE / "examples" / run.script), *arguments),
        nodes=run.nodes,
        ranks_per_node=run.ranks_per_node,
        spare_nodes=run.spares,
        policy_file=PACKAGE / "configs" / run.policy,
        communicator=run.communicator,
        device=run.device,
        job_directory=directory / name / "job",
        environment={**run.environment, env.FAULTS: msgspec.json.encode(faults).decode()},
    )
    job = create_job(start)
    with page_beside(job.job_directory, page, Role.OPERATOR):
        run_job(job, quiet=True, steps=steps)


def _assets(folder: Path) -> Path:
    """Make what torchtitan's wheel lacks, once for both runs: in a process of its own, as it starts threads."""
    if not folder.exists():
        command = [*own_program("midstep.examples.torchtitan.assets"), str(folder)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=ASSETS_S, check=False)
        if made.returncode != 0:
            raise ConfigurationError(f"`{' '.join(command[1:])}` failed: {made.stderr.strip()[-500:]}")
    return folder


class Comparison(msgspec.Struct, frozen=True):
    """`differences` is empty when both runs are equal bit for bit. `losses` is the mean loss by step."""

    equal: dict[str, bool]
    differences: tuple[str, ...]
    losses: tuple[float, ...]

    @property
    def bit_exact(self) -> bool:
        """True if nothing differs."""
        return not self.differences


def _comparison_table(comparison: Comparison, steps: int) -> Table:
    table = Table(box=None, show_header=False)
    for name, same in comparison.equal.items():
        table.add_row(name, Text("equal, bit for bit", style="green") if same else Text("DIFFERENT", style="red"))
    if comparison.losses:
        table.add_row("loss", f"{comparison.losses[0]:.4f} at step 0, {comparison.losses[-1]:.4f} at step {steps - 1}")
    return table


def _as_data(status: JobStatus, comparison: Comparison) -> dict[str, Any]:
    return {
        "bit_exact": comparison.bit_exact,
        "differences": list(comparison.differences),
        "incidents": [incident_json(incident) for incident in status.incidents],
    }


def _problems(status: JobStatus, comparison: Comparison, plan: tuple[Scenario, ...]) -> list[str]:
    problems = list(comparison.differences)
    if status.exit_code != 0:
        problems.append(f"the job ended with exit code {status.exit_code}: {status.reason}")
    incidents = [incident for incident in status.incidents if incident.outcome is not Outcome.DISMISSED]
    if len(incidents) != len(plan):
        problems.append(f"{len(incidents)} incidents, not {len(plan)}")
    for scenario, incident in zip(plan, incidents, strict=False):
        if incident.rung is not scenario.rung:
            problems.append(f"incident {incident.number} ({scenario.title}): rung {incident.rung}, not {scenario.rung}")
        if incident.steps_lost or not incident.healthy_pids_kept or incident.resumed_s is None:
            problems.append(
                f"incident {incident.number} ({scenario.title}): {incident.steps_lost} steps lost, healthy processes "
                f"{'kept' if incident.healthy_pids_kept else 'not kept'}, {incident.outcome}"
            )
    return problems


def compare(undisturbed: Path, disturbed: Path, ranks: int, steps: int) -> Comparison:
    """Compare two record directories, rank by rank."""
    differences: list[str] = []
    equal = {"loss curve": True}
    losses = [0.0] * steps
    for rank in range(ranks):
        for name, same in _digests(undisturbed, disturbed, rank, differences).items():
            equal[name] = equal.get(name, True) and same
        one, other = (_losses(directory / f"loss.{rank}", differences) for directory in (undisturbed, disturbed))
        for step in range(steps):
            if one.get(step) != other.get(step) or step not in one:
                equal["loss curve"] = False
                differences.append(f"rank {rank}: the loss of step {step} is {other.get(step)}, not {one.get(step)}")
            losses[step] += float.fromhex(one.get(step, "nan")) / ranks
    return Comparison(equal, tuple(differences), tuple(losses))


def _digests(undisturbed: Path, disturbed: Path, rank: int, differences: list[str]) -> dict[str, bool]:
    try:
        one, other = (
            json.loads((directory / f"digest.{rank}.json").read_text()) for directory in (undisturbed, disturbed)
        )
    except OSError as error:
        differences.append(f"rank {rank}: no digest: {error}")
        return {"digests": False}
    same = {name: one[name] == other.get(name) for name in one}
    differences += [f"rank {rank}: {name} differ" for name, is_same in same.items() if not is_same]
    return same


def _losses(path: Path, differences: list[str]) -> dict[int, str]:
    """Return the loss of each step, as hex; a step that was repeated must have given the same bits each time."""
    losses: dict[int, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        step, value = line.split()
        if losses.setdefault(int(step), value) != value:
            differences.append(f"{path.name}: step {step} gave {value} when repeated, and {losses[int(step)]} before")
    return losses
