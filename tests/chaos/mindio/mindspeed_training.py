"""A training whose recovery is MindSpeed-LLM's: its files tft_*.py, unmodified, with Megatron-LM's groups.

The optimizer is a small one with the methods that those files call, divided over a replica group as theirs is.
Arguments: RECORDS STEPS, and a JSON list of faults `[rank, step, where]` at which the first process of a rank kills
itself. `where`: before, collective, update.
"""

import inspect
import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import mindspeed_stand_ins

mindspeed_stand_ins.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.training import get_args, get_timers, global_vars  # noqa: E402
from mindio_ttp.framework_ttp import tft_end_updating_os, tft_start_updating_os  # noqa: E402
from mindspeed_llm.core.high_availability import (  # noqa: E402
    tft_register_processor,
    tft_train_initialize,
    ttp_get_dp_cp_replica_group,
)
from mindspeed_llm.tasks.high_availability.initialize_patch import initialize_distributed_wrapper  # noqa: E402

mindspeed_stand_ins.patch_torch()

SIZE, FIRST = 64, 100
TAKES_PROVIDERS = len(inspect.signature(tft_register_processor).parameters) == 3  # 2.3.0; later versions take nothing
RECORDS, STEPS, FAULTS = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIFE = int(os.environ["MIDSTEP_INCARNATION"])


class Model:
    """Parameters, and what the clean handler looks for in Megatron's DDP."""

    def __init__(self) -> None:
        torch.manual_seed(1 if LIFE == 1 else 1000 + RANK)
        self.parameters = torch.randn(SIZE)
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.buffers: list[Any] = []
        self.expert_parallel_buffers: list[Any] = []


class Optimizer:
    """A half of the parameters and their moments; a rank of the other replica group has the same half."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.half = RANK % 2
        self.main = model.parameters[self._range()].clone()
        self.moments = torch.zeros(2, SIZE // 2)
        self.param_groups: list[dict[str, Any]] = []
        self.data_parallel_group_gloo: Any = None

    def _range(self) -> slice:
        return slice(self.half * SIZE // 2, (self.half + 1) * SIZE // 2)

    def step(self, gradient: torch.Tensor) -> None:
        """Update the half, and gather the whole."""
        mine = gradient[self._range()] / WORLD
        tft_start_updating_os(-1)
        self.moments[0].mul_(0.9).add_(mine, alpha=0.1)
        fail("update")
        self.moments[1].mul_(0.99).addcmul_(mine, mine, value=0.01)
        self.main.sub_(0.01 * self.moments[0] / (self.moments[1].sqrt() + 1e-8))
        tft_end_updating_os(get_args().iteration + 1)
        self._copy_main_params_to_model_params()
        self.sync_gather_all_model_params(force_sync=True)

    def _copy_main_params_to_model_params(self) -> None:
        self.model.parameters[self._range()] = self.main

    def sync_gather_all_model_params(self, force_sync: bool) -> None:
        """Gather the halves of the replica group."""
        dist.all_gather_into_tensor(self.model.parameters, self.main.clone(), group=ttp_get_dp_cp_replica_group())

    def state_dict_memory(self) -> dict[str, Any]:
        """Return what is not in tensors."""
        return {"half": self.half}

    def load_state_dict_memory(self, state: dict[str, Any]) -> None:
        """Take what a peer had."""
        assert state["half"] == self.half

    def send_optim_param_state(self, dest: int, group: Any, index: int) -> None:
        """Send the half."""
        for tensor in (self.main, self.moments):
            dist.send(tensor, dst=dest, group=group)

    def recv_and_load_optim_param_state(self, source: int, group: Any, index: int) -> None:
        """Receive it."""
        for tensor in (self.main, self.moments):
            dist.recv(tensor, src=source, group=group)


class Scheduler:
    """Counts, as Megatron's does."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        """Count."""
        self.num_steps += increment

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Add a peer's count, as Megatron's does."""
        self.step(state["num_steps"])


def fail(where: str) -> None:
    """Kill this process if that is due here."""
    if LIFE == 1 and [RANK, get_args().iteration - FIRST, where] in FAULTS:
        if where == "collective":
            time.sleep(0.2)  # the others are in it
        os.kill(os.getpid(), signal.SIGKILL)


def train(forward: Any, models: list[Model], optimizer: Optimizer, scheduler: Scheduler, *iterators: Any) -> int:
    """Train, as Megatron-LM's function of the name is called."""
    args = get_args()
    get_timers()("interval-time", log_level=0).start(barrier=False)
    while args.iteration < FIRST + STEPS:
        fail("before")
        data = torch.randn(8, SIZE)
        gradient = data.t() @ torch.tanh(data @ models[0].parameters) / 8
        fail("collective")
        dist.all_reduce(gradient, group=mpu.get_data_parallel_group(with_context_parallel=True))
        loss = float(gradient.square().sum())
        optimizer.step(gradient)
        scheduler.step(args.global_batch_size)
        with (RECORDS / f"steps.{RANK}").open("a") as file:
            print(args.iteration - FIRST, loss.hex(), models[0].parameters.numpy().tobytes().hex()[:64], file=file)
        args.iteration += 1
        args.consumed_train_samples += args.global_batch_size
    return int(args.iteration)


def arguments() -> Namespace:
    """Return those of Megatron-LM and MindSpeed-LLM that their files ask for."""
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    return Namespace(
        **{f"{name}_parallel_size": 1 for name in sizes},
        rank=RANK, world_size=WORLD, local_rank=int(os.environ["LOCAL_RANK"]),
        enable_high_availability=True, enable_worker_reboot=True, enable_hbmfault_repair=True,
        enable_elastic_training=False, use_distributed_optimizer=True, use_tp_pp_dp_mapping=False,
        distributed_timeout_minutes=1, load=None, save=str(RECORDS), pretrained_checkpoint=None, finetune=True,
        iteration=FIRST, curr_iteration=FIRST, train_samples=None, global_batch_size=8, num_experts=None,
        consumed_train_samples=FIRST * 8, consumed_valid_samples=0, skip_train=True, dataloader_type="single",
        num_floating_point_operations_so_far=0, num_query_groups=1, do_train=True, do_valid=False, do_test=False,
        train_iters=STEPS, eval_interval=1000, eval_iters=0, virtual_pipeline_model_parallel_size=None,
        timing_log_level=0, timing_log_option="minmax", tp_2d=False, log_params_norm=False,
    )  # fmt: skip


def initialize() -> None:
    """Make torch's group and Megatron's."""
    dist.init_process_group(mindspeed_stand_ins.BACKEND, world_size=WORLD, rank=RANK)
    mpu.initialize_model_parallel(distributed_timeout_minutes=1)


def no_datasets(sizes: Any) -> tuple[None, None, None]:
    """Provide none: this training draws its samples."""
    return None, None, None


def train_resiliently(*given: Any) -> int:
    """Train by MindSpeed-LLM's wrapper of the training function, as its `pretrain` of each version does."""
    if not TAKES_PROVIDERS:
        tft_register_processor()
        return int(tft_train_initialize.tft_train_wrapper(train)(*given))
    mindspeed_stand_ins.add_module("mindspeed_llm.training.training", train=train)
    tft_register_processor(no_datasets, None, None)
    return int(tft_train_initialize.tft_train(list(given), [None]))


def main() -> None:
    """Set everything up in MindSpeed-LLM's order, and train."""
    global_vars.set_args(arguments())
    global_vars._set_timers(get_args())
    initialize_distributed_wrapper(initialize)()
    get_timers()("interval-time", log_level=0)
    model, scheduler = Model(), Scheduler()
    if LIFE == 1 or not TAKES_PROVIDERS:  # 2.3.0 adds a peer's count to what a newcomer has loaded
        scheduler.step(FIRST * 8)
    optimizer = Optimizer(model)
    end = train_resiliently(None, [model], optimizer, scheduler, None, None, None, None)
    state = torch.cat([model.parameters, optimizer.main, optimizer.moments.flatten(), torch.rand(4)])
    result = {"end": end, "pid": os.getpid(), "samples": [get_args().consumed_train_samples, scheduler.num_steps]}
    (RECORDS / f"end.{RANK}.json").write_text(json.dumps({**result, "state": state.numpy().tobytes().hex()}))


main()
