"""A training that knows mindio_ttp and nothing of midstep: the calls and handlers that MindSpeed-LLM's files have.

torch-npu is the fake one, under its own name. Every rank keeps half of the optimizer's state and another one the same
half; parameters are gathered. Arguments: RECORDS STEPS, and a JSON list of faults `[rank, step, where, how]`, in the
order of their steps: after a kill the next fault of a rank is one of its next process. `where`: before, collective,
update, barrier. `how`: kill, raise, link, memory, or low (damaged memory that no tensor has). With a further argument,
`converting`, two changes of the parameters' form are bracketed as updates are, as MindSpeed-LLM does it with
--reuse-fp32-param: before the update and after it, with the number of the step that was committed last. With
`--load FOLDER` a checkpoint is written every five steps, and the newest is loaded as Megatron does, at the start and by
the repair handler. After it `alone`: no rank is a replica of another; `slow`: steps take a quarter of a second; `lies`:
the handler says another step than the one that it has loaded.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import script_group
import torch
import torch.distributed as dist

from midstep.devices import fake
from midstep.devices.fake_chip import CHIP
from midstep.processor import built_ahead

sys.modules["torch_npu"] = fake
script_group.register()

from mindio_ttp.framework_ttp import (  # noqa: E402
    OptimizerType,
    RepairType,
    tft_end_updating_os,
    tft_exception_handler,
    tft_init_processor,
    tft_is_reboot_node,
    tft_register_clean_handler,
    tft_register_exception_handler,
    tft_register_rebuild_group_handler,
    tft_register_rename_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_report_load_ckpt_step,
    tft_set_dp_group_info,
    tft_set_optimizer_replica,
    tft_start_processor,
    tft_start_updating_os,
)
from mindio_ttp.framework_ttp.ttp_decorator import tft_get_repair_type  # noqa: E402

BACKEND = "fake_hccl"
SIZE = 64
FIRST = 100  # the script's own count begins there, as after its own checkpoint
PERSISTENT = 3
RECORDS, STEPS, FAULTS = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
TOGETHER_S = 60.0
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CONVERTING = sys.argv[4:] == ["converting"]
FOLDER = Path(sys.argv[5]) if sys.argv[4:5] == ["--load"] else None
ALONE, SLOW, LIES = (each in sys.argv[6:] for each in ("alone", "slow", "lies"))
SAVED_EVERY = 5


def life() -> int:
    """Return the number of this process among those of its rank. One that is built ahead does not know it at first."""
    return int(os.environ["MIDSTEP_INCARNATION"])


class Model:
    """Parameters on all ranks, Adam's moments for one half of them on two ranks each."""

    def __init__(self) -> None:
        newcomer = built_ahead.is_waiting() or life() > 1
        torch.manual_seed(1000 + RANK if newcomer else 1)  # what a newcomer has, it must have got from a peer
        self.parameters = torch.randn(SIZE)
        self.half = RANK % 2
        self.moments = torch.zeros(2, SIZE // 2)
        self.iteration = FIRST
        self.counted = 0
        self.rebooting = False

    def slice(self) -> torch.Tensor:
        """Return the half that this rank updates."""
        return self.parameters[self.half * SIZE // 2 : (self.half + 1) * SIZE // 2]


class Groups:
    """All ranks, and those that hold other halves than each other."""

    world: Any = None
    halves: Any = None

    def make(self) -> None:
        """Make them, or make them again, on all ranks."""
        for group in filter(None, (self.world, self.halves)):
            dist.destroy_process_group(group)
        self.world = dist.new_group(list(range(WORLD)), backend=BACKEND, use_local_synchronization=True)
        pairs = [[2 * pair, 2 * pair + 1] for pair in range(WORLD // 2)]
        mine = next(pair for pair in pairs if RANK in pair)
        self.halves = dist.new_group(mine, backend=BACKEND, use_local_synchronization=True)


MODEL, GROUPS = Model(), Groups()
CHOSEN: int | None = None  # the step of the checkpoint that is to be loaded
DONE: set[tuple[int, str]] = set()


def note(what: str, *values: Any) -> None:
    """Write down what a handler was called with."""
    with (RECORDS / f"handlers.{RANK}.{life()}").open("a") as file:
        print(json.dumps([what, tft_get_repair_type(), *values]), file=file, flush=True)


# --- handlers ---------------------------------------------------------------------------------------------------------


def stop_callback(train_args: Any, ctx: Any) -> None:
    """Stop the device. That a number is drawn here is as if the next step had begun: it is to have no effect."""
    note("stop", len(train_args), ctx)
    torch.rand(1)
    fake.stop_device(fake.current_device())


def clean_callback(is_uce_error: bool, train_args: Any, ctx: Any) -> int:
    """Make it usable again."""
    note("clean", is_uce_error, len(train_args), ctx)
    result = 0
    if is_uce_error:
        found = fake.check_uce_in_memory(fake.current_device())
        result = 0 if found == PERSISTENT else 2
    if tft_get_repair_type() == "retry":
        fake.reinit_process_group(group=None, rebuild_link=False)
    fake.restart_device(fake.current_device())
    for tensor in (MODEL.parameters, MODEL.moments):
        fake.update_npu_tensor_to_safe(tensor)
    return result


def rebuild_callback(fault_ranks: list[int], train_args: Any, ctx: Any) -> None:
    """Make the groups again."""
    note("rebuild_group", fault_ranks, len(train_args), ctx)
    MODEL.rebooting = False
    GROUPS.make()


def repair_callback(  # noqa: PLR0917
    step: int, need_rebuild: bool, error_ranks: list[int], repair_info: dict[str, Any], train_args: Any, ctx: Any
) -> None:
    """Send or receive a half, or load a checkpoint with all others."""
    note("repair", step, need_rebuild, error_ranks, repair_info, len(train_args), ctx)
    if repair_info["repair_type"] in {RepairType.RT_LOAD_CKPT.value, RepairType.RT_LOAD_REBUILD.value}:
        dist.barrier(group=GROUPS.world)  # Megatron's timers have one
        fail_in_load()
        load_chosen()
        tft_report_load_ckpt_step(MODEL.iteration - LIES)
        return
    group = dist.new_group(repair_info["rank_list"], backend=BACKEND, use_local_synchronization=True)
    for kind, source, destination in zip(repair_info["type"], repair_info["src"], repair_info["dst"], strict=True):
        assert kind == OptimizerType.ATTENTION.value
        for tensor in (MODEL.parameters, MODEL.moments):
            if repair_info["repair_type"] == RepairType.RT_SEND.value:
                dist.send(tensor, destination, group=group)
            else:
                dist.recv(tensor, source, group=group)
    dist.destroy_process_group(group)


def choose(text: str) -> str:
    """Remember the checkpoint that a text asks for, as MindSpeed-LLM's handler does."""
    global CHOSEN  # noqa: PLW0603
    found = re.search(r"load ckpt step=(\d+)", text)
    CHOSEN = int(found.group(1)) if found else None
    return "PRECISION ERROR"


def load_chosen() -> None:
    """Have the chosen checkpoint be the newest one, as MindSpeed-LLM does before it loads."""
    global CHOSEN  # noqa: PLW0603
    if CHOSEN is not None:
        if RANK == 0:
            tracker().write_text(str(CHOSEN))
        dist.barrier(group=GROUPS.world)
    CHOSEN = None
    load()


def tracker() -> Path:
    """Return the file that names the newest checkpoint."""
    assert FOLDER is not None
    return FOLDER / "latest_checkpointed_iteration.txt"


def save() -> None:
    """Write a checkpoint, and name it when all have written theirs, as Megatron does."""
    assert FOLDER is not None
    write(FOLDER / f"iter_{MODEL.iteration:07d}")
    dist.barrier(group=GROUPS.world)
    if RANK == 0:
        tracker().write_text(str(MODEL.iteration))
    dist.barrier(group=GROUPS.world)


def write(place: Path) -> None:
    """Write all that this rank has."""
    place.mkdir(parents=True, exist_ok=True)
    state = {"parameters": MODEL.parameters, "moments": MODEL.moments, "random": torch.get_rng_state()}
    torch.save(state, place / f"{RANK}.pt")


def load() -> None:
    """Load the newest checkpoint, random numbers too."""
    assert FOLDER is not None
    step = int(tracker().read_text())
    state = torch.load(FOLDER / f"iter_{step:07d}" / f"{RANK}.pt")
    MODEL.parameters.copy_(state["parameters"])
    MODEL.moments.copy_(state["moments"])
    torch.set_rng_state(state["random"])
    MODEL.iteration = step


def fail_in_load() -> None:
    """End the first process of this rank that loads in a repair, where that is asked for."""
    mark = RECORDS / f"loading.{RANK}"
    if [RANK, "load"] in FAULTS and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def rollback_callback(step: int, train_args: Any, ctx: Any) -> None:
    """Count from the step."""
    note("rollback", step, len(train_args), ctx)
    dist.all_gather_into_tensor(MODEL.parameters, MODEL.slice().clone(), group=GROUPS.halves)
    MODEL.iteration = step
    with (RECORDS / f"held.{RANK}.{life()}").open("a") as file:
        print(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), file=file)


def save_callback(step: int, save_info: list[dict[str, Any]], train_args: Any, ctx: Any) -> None:
    """Write the own half, together with who writes the other one."""
    note("save_ckpt", step, save_info, len(train_args), ctx)
    ranks = save_info[0]["ranks"]
    group = dist.new_group(ranks, backend=BACKEND, use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=group)  # a handler may need all that write
    if FOLDER is not None:
        write(FOLDER / f"iter_{step:07d}_tmp")
        return
    place = RECORDS / f"dump.{step}.tmp"
    place.mkdir(exist_ok=True)
    if [RANK, "dump"] in FAULTS:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.save({"half": MODEL.half, "own": MODEL.slice().clone(), "moments": MODEL.moments}, place / f"{RANK}.pt")


def rename_callback(step: int, train_args: Any) -> None:
    """Give it its name."""
    note("rename", step, len(train_args))
    if FOLDER is not None:
        (FOLDER / f"iter_{step:07d}_tmp").rename(FOLDER / f"iter_{step:07d}")
        tracker().write_text(str(step))
        return
    (RECORDS / f"dump.{step}.tmp").rename(RECORDS / f"dump.{step}")


# --- training ---------------------------------------------------------------------------------------------------------


def is_due(where: str) -> bool:
    """Return whether a fault is due here in this step and this process."""
    step = MODEL.iteration - FIRST
    lives = 1 + sum(each[0] == RANK and each[1] < step and each[3] == "kill" for each in FAULTS if len(each) > 2)
    return lives == life() and any(each[:3] == [RANK, step, where] for each in FAULTS) and (step, where) not in DONE


def die_together(step: int, where: str) -> None:
    """Kill this process as soon as all that are to die here have come: a slower one would be asked for its copy."""
    (RECORDS / f"dies.{step}.{where}.{RANK}").touch()
    others = {each[0] for each in FAULTS if each[1:] == [step, where, "kill"]}
    deadline_s = time.monotonic() + TOGETHER_S
    while not all((RECORDS / f"dies.{step}.{where}.{rank}").exists() for rank in others):
        assert time.monotonic() < deadline_s, f"not all of ranks {others} have come to step {step}"
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(where: str) -> None:
    """Cause the fault that is due here."""
    step = MODEL.iteration - FIRST
    due = is_due(where)
    for rank, at, place, how in (each for each in FAULTS if len(each) > 2):
        if due and (rank, at, place) == (RANK, step, where):
            DONE.add((at, where))
            if how == "kill":
                die_together(at, where)
            if how == "raise":
                raise RuntimeError("a mistake of the script's")
            if how == "link":
                raise RuntimeError("HCCL OP RETRY FAILED")
            if how == "memory":
                CHIP.corrupt(MODEL.parameters)
                raise RuntimeError("UCE ERROR")
            if how.startswith("wrong"):
                raise RuntimeError(f"PRECISION ERROR: the loss is no number {how.removeprefix('wrong')}")
            if how == "low":
                CHIP.corrupted_unused = True
                raise RuntimeError("UCE ERROR")


def convert() -> None:
    """Change the form of the parameters, where they have two. A process counts steps from its first update on."""
    if CONVERTING:
        tft_start_updating_os()
        tft_end_updating_os(max(MODEL.counted, 1))


def step_once() -> None:
    """Do one step: gradients of random data, an update of the own half, and the whole gathered."""
    fail("before")
    time.sleep(0.25 * SLOW)
    data = torch.randn(8, SIZE)  # other numbers on each rank and in each step
    gradient = data.t() @ torch.tanh(data @ MODEL.parameters) / 8
    if is_due("collective"):
        time.sleep(0.2)  # the others are in it
    fail("collective")
    dist.all_reduce(gradient, group=GROUPS.world)
    loss = float(gradient.square().sum())
    if is_due("barrier"):
        threading.Timer(0.0, fail, ("barrier",)).start()
        time.sleep(0.3)
    convert()
    tft_start_updating_os()
    mine = gradient[MODEL.half * SIZE // 2 : (MODEL.half + 1) * SIZE // 2] / WORLD
    MODEL.moments[0].mul_(0.9).add_(mine, alpha=0.1)
    fail("update")
    MODEL.moments[1].mul_(0.99).addcmul_(mine, mine, value=0.01)
    MODEL.slice().sub_(0.01 * MODEL.moments[0] / (MODEL.moments[1].sqrt() + 1e-8))
    tft_end_updating_os(MODEL.iteration + 1)
    MODEL.counted = MODEL.iteration + 1
    convert()
    dist.all_gather_into_tensor(MODEL.parameters, MODEL.slice().clone(), group=GROUPS.halves)
    while (RECORDS / f"gate.{MODEL.iteration + 1 - FIRST}").exists():
        time.sleep(0.02)
    with (RECORDS / f"steps.{RANK}").open("a") as file:
        print(MODEL.iteration - FIRST, loss.hex(), MODEL.parameters.numpy().tobytes().hex()[:64], file=file)
    MODEL.iteration += 1
    if FOLDER is not None and (MODEL.iteration - FIRST) % SAVED_EVERY == 0:
        save()


@tft_exception_handler  # type: ignore[untyped-decorator, unused-ignore]
def train(model: Model, steps: int) -> int:
    """Train."""
    if MODEL.rebooting:
        raise RuntimeError("ARF FINISH")
    while MODEL.iteration < FIRST + steps:
        step_once()
    return MODEL.iteration


def main() -> None:
    """Set everything up as a framework does, and train."""
    fake.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKEND)
    tft_init_processor(RANK, WORLD, False, False, "", True, True, False)
    tft_start_processor("127.0.0.1", 8000)
    MODEL.rebooting = tft_is_reboot_node()
    GROUPS.make()
    replicas = 1 if ALONE else WORLD // 2
    tft_set_optimizer_replica(RANK, [{"rank_list": list(range(WORLD)), "replica_cnt": replicas, "replica_shift": 0}])
    tft_set_dp_group_info(RANK, list(range(WORLD)))
    tft_register_stop_handler(stop_callback)
    tft_register_clean_handler(clean_callback)
    tft_register_rebuild_group_handler(rebuild_callback)
    tft_register_repair_handler(repair_callback)
    tft_register_rollback_handler(rollback_callback)
    tft_register_save_ckpt_handler(save_callback)
    tft_register_rename_handler(rename_callback)
    tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", choose)
    if FOLDER is not None and tracker().exists() and not MODEL.rebooting:
        load()
    end = train(MODEL, STEPS)
    state = torch.cat([MODEL.parameters, MODEL.moments.flatten(), torch.rand(4)])
    (RECORDS / f"end.{RANK}.json").write_text(
        json.dumps({"end": end, "pid": os.getpid(), "state": state.numpy().tobytes().hex()})
    )


main()
