"""A training that is MindSpore's: `Model.train` with its `TrainFaultTolerance`, both as they are. It knows no midstep.

Arguments: RECORDS STEPS, a JSON list of faults `[rank, step, where, how]` for the first process of each rank, and how
many stages the pipeline has. `where`: before, collective, update, barrier, repair. `how`: kill, or link (an error that
all can go on from).
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ascend_stand_ins as ascend
import mindspore as ms
import numpy as np
from mindspore import dataset, nn, ops
from mindspore.communication import init
from mindspore.train import Callback, Model, TrainFaultTolerance
from mindspore.utils import _tft_handler

RECORDS, STEPS, FAULTS = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
STAGES = int(sys.argv[4])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
REPLICAS = WORLD // STAGES
STAGE, REPLICA = divmod(RANK, REPLICAS)
GROUP = range(STAGE * REPLICAS, (STAGE + 1) * REPLICAS)
LIFE = int(os.environ["MIDSTEP_INCARNATION"])
DONE: set[int] = set()


def fail(where: str) -> None:
    """Cause the fault that is due here, when the others are in what comes next."""
    for rank, at, place, how in FAULTS:
        if LIFE == 1 and (rank, at, place) == (RANK, DEVICE.step, where) and at not in DONE:
            DONE.add(at)
            time.sleep(0.2)
            if how == "link":
                raise RuntimeError("HCCEError occurs when execute. HCCL OP RETRY FAILED")
            os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Cell):  # type: ignore[misc]
    """A small network, with a mask that numpy draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(16, 32), nn.Dense(32, 4)

    def construct(self, data: Any) -> Any:
        mask = ms.Tensor((np.random.rand(32) > 0.1).astype(np.float32))
        return self.second(ops.relu(self.first(data)) * mask)


class First(nn.Cell):  # type: ignore[misc]
    """The first stage of that network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(16, 32)

    def construct(self, data: Any, mask: Any) -> Any:
        return ops.relu(self.first(data)) * mask


class Last(nn.Cell):  # type: ignore[misc]
    """The last stage, with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.loss = nn.Dense(32, 4), nn.CrossEntropyLoss()

    def construct(self, hidden: Any, labels: Any) -> Any:
        return self.loss(self.second(hidden), labels)


def made_network() -> Any:
    """Return what this rank trains."""
    if STAGES == 1:
        return nn.WithLossCell(Net(), nn.CrossEntropyLoss())
    return Last() if STAGE else First()


class Adam(nn.Optimizer):  # type: ignore[misc]
    """MindSpore's Adam, whose update is compiled, in what its wrapper can be made of in PyNative mode."""

    def __init__(self, parameters: Any, learning_rate: float) -> None:
        super().__init__(learning_rate, parameters)
        self.adam = nn.Adam(parameters, learning_rate=learning_rate)
        self.global_step = self.adam.global_step

    def construct(self, gradients: Any) -> Any:
        fail("update")
        return self.adam(gradients)


class Step(nn.Cell):  # type: ignore[misc]
    """Gradients, their sum over all ranks, and the update by MindSpore's wrapper of the optimizer."""

    def __init__(self, network: Any, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer
        self.gradients = {1: ms.value_and_grad(network, None, optimizer.parameters)}.get(STAGES, self.through_stages)
        self.rebooted = _tft_handler.get_tft().tft_is_reboot_node()

    def construct(self, data: Any, labels: Any) -> Any:
        if self.rebooted:
            self.rebooted = False
            raise RuntimeError("ARF FINISH")  # the graph executor's, on Ascend
        DEVICE.step = int(self.optimizer.global_step.asnumpy().item())
        loss, gradients = self.gradients(data, labels)
        fail("collective")
        parts = [each.asnumpy() for each in gradients]
        flat = DEVICE.allreduce(np.concatenate([part.reshape(-1) for part in parts]), "gradients", GROUP) / REPLICAS
        ends = np.cumsum([part.size for part in parts])
        pieces = zip(np.split(flat, ends[:-1]), parts, strict=True)
        fail("barrier")
        self.optimizer(tuple(ms.Tensor(piece.reshape(part.shape)) for piece, part in pieces))
        return loss

    def through_stages(self, data: Any, labels: Any) -> tuple[Any, Any]:
        """Return the loss and this stage's gradients; data goes forward, and its gradient back."""
        network, parameters = self.network, self.optimizer.parameters
        if STAGE:
            hidden = ms.Tensor(DEVICE.receive("hidden", RANK - REPLICAS))
            loss, (back, gradients) = ms.value_and_grad(network, 0, parameters)(hidden, labels)
            DEVICE.send(back.asnumpy(), "back")
            DEVICE.send(loss.asnumpy(), "loss")
            return loss, gradients
        mask = ms.Tensor((np.random.rand(32) > 0.1).astype(np.float32))
        DEVICE.send(network(data, mask).asnumpy(), "hidden")
        back = ms.Tensor(DEVICE.receive("back", RANK + REPLICAS))
        _, gradients = ms.value_and_grad(lambda data: (network(data, mask) * back).sum(), None, parameters)(data)
        return ms.Tensor(DEVICE.receive("loss", RANK + REPLICAS)), gradients


class Source:
    """The data of this rank, by their number."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        numbers = np.random.RandomState(7 + 1000 * REPLICA + int(index))
        data = numbers.randn(8, 16).astype(np.float32)
        return data, np.abs(data[:, :4]).argmax(1).astype(np.int32)


class Watch(Callback):  # type: ignore[misc]
    """Writes down every step that was done, kills right after one, and waits as long as there is a gate."""

    def on_train_step_end(self, run_context: Any) -> None:
        arguments = run_context.original_args()
        loss = float(np.asarray(arguments.net_outputs.asnumpy()).mean())
        with (RECORDS / f"steps.{RANK}").open("a") as file:
            print(arguments.cur_step_num - 1, loss.hex(), file=file)
        DEVICE.step = arguments.cur_step_num
        fail("before")
        while (RECORDS / f"gate.{DEVICE.step}").exists():
            time.sleep(0.02)


def main() -> None:
    """Set everything up as MindFormers does, and train."""
    ms.set_device("CPU")
    init()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ascend.install(DEVICE, "data_parallel" if STAGES == 1 else "semi_auto_parallel")
    DEVICE.before_copy = lambda: fail("repair")
    _tft_handler.init(config=None)
    ms.set_seed(1 if LIFE == 1 else 1000 + RANK)  # what a newcomer has, it must have got from a peer
    network = made_network()
    optimizer = TrainFaultTolerance.get_optimizer_wrapper(Adam)(network.trainable_params(), learning_rate=1e-2)
    step = Step(network, optimizer)
    # As the graph compiler writes it down: which devices of a stage, and no dimension cut over them.
    step.parameter_layout_dict = {
        each.name: [[REPLICAS], [-1], list(each.shape), 0, True, ""] for each in network.trainable_params()
    }
    np.random.seed(RANK if LIFE == 1 else 1000 + RANK)
    data = dataset.GeneratorDataset(Source(), ["data", "labels"], shuffle=False, num_parallel_workers=1)
    Model(step).train(1, data, callbacks=[TrainFaultTolerance(str(RECORDS)), Watch()], dataset_sink_mode=False)
    digest = hashlib.sha256()
    for _, parameter in sorted(step.parameters_and_names(), key=lambda item: item[0]):
        digest.update(parameter.asnumpy().tobytes())
    numbers = np.random.rand(4).tobytes().hex()
    end = {"pid": os.getpid(), "life": LIFE, "parameters": digest.hexdigest(), "numbers": numbers}
    (RECORDS / f"end.{RANK}.json").write_text(json.dumps(end))


DEVICE = ascend.Device(RECORDS, RANK, WORLD, LIFE)
main()
