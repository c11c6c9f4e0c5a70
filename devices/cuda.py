"""An NVIDIA GPU, through torch.cuda.

Nothing can be stopped on a GPU from outside but the collectives, which their communicator aborts: kernels of the script
end by themselves. So `stop` only marks the device, and `clean` proves that it is idle. Some errors (an illegal address,
a failed assertion in a kernel, an uncorrectable memory error) end the context of a process for good: every later call
raises the same error, and only another process can use the device again. Contexts of other processes are not affected.
`configs/exceptions.yaml` says which errors these are.
"""

import gc
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.optim.adamw import adamw

from ..protocol.errors import ConfigurationError, RecoveryError
from ..protocol.types import FaultAction
from .base import Damage

_log = logging.getLogger("midstep")

DRAIN_S = 5.0  # how long kernels of a script may take to end, once its collectives are aborted
_ILLEGAL_WRITE = 'extern "C" __global__ void write_nowhere(float* at) { at[1LL << 42] = 1.0f; }'


class CudaDevice:
    """See Device."""

    name = "cuda"

    def __init__(self) -> None:
        self.stopped = False
        self._index = 0

    @property
    def torch_device(self) -> torch.device:
        """The GPU of this process."""
        return torch.device("cuda", self._index)

    def prepare(self, local_rank: int, environment: Mapping[str, str], link_up_s: float) -> None:
        """Take the GPU whose number is `local_rank`, or share one where there are fewer GPUs than ranks."""
        gpus = torch.cuda.device_count()
        if gpus == 0:
            raise ConfigurationError("no GPU can be used here: torch.cuda.device_count() is 0. See `midstep doctor`.")
        wrong = problems(environment)
        if wrong:
            lines = "\n".join(f"  - {line}." for line in wrong)
            raise ConfigurationError(f"a GPU cannot be recovered in this environment:\n{lines}")
        self._index = local_rank % gpus
        torch.cuda.set_device(self._index)
        torch.cuda.synchronize(self._index)  # opens the context here, where what it raises is understood
        threading.Thread(target=self._load, name="midstep-kernel-load", daemon=True).start()

    def _load(self) -> None:
        """Load cuBLAS and the kernels of most models while the script builds its own, or its first step would."""
        try:
            torch.cuda.set_device(self._index)
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call,unused-ignore]
                for dtype in (torch.float32, torch.bfloat16):
                    train_small_step(self.torch_device, dtype)
        except RuntimeError as error:  # the first step meets it, too, and can report it
            _log.warning("kernels could not be loaded ahead of their use: %s", _first_line(error))

    def stop(self) -> None:
        """Mark the device: the communicators' abort has ended all that another rank can hold up."""
        self.stopped = True

    def memory_error_raised(self) -> None:
        """Do nothing: a context does not survive an error in its memory."""

    def clean(self) -> Damage:
        """Wait until the device is idle. Raises RecoveryError if it is not in time, or if its context is lost."""
        if not self.stopped:
            return Damage.NONE
        drained = _in_time(lambda: torch.cuda.synchronize(self._index), DRAIN_S)
        if not drained:
            raise RecoveryError(
                f"GPU {self._index} is still busy {DRAIN_S:g} s after its collectives were aborted: a kernel of the "
                "script does not end. This process is replaced"
            )
        self.stopped = False
        return Damage.NONE

    def release_unused(self) -> None:
        """Collect garbage, which may hold tensors, and empty the allocator's cache."""
        gc.collect()
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise RecoveryError(f"cannot empty the cache of GPU {self._index}: {_first_line(error)}") from error

    def corrupted(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return False: a context does not survive an error in its memory."""
        return False

    def mark_safe(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: no tensor is ever locked."""

    def finish(self) -> None:
        """Synchronize with the device."""
        torch.cuda.synchronize(self._index)

    def capture_random(self) -> bytes:
        """Return the state of the generator: seed and offset, which are in host memory."""
        return torch.cuda.get_rng_state(self._index).numpy().tobytes()

    def restore_random(self, state: bytes) -> None:
        """Set the state of the generator."""
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), self._index)

    def now_us(self) -> int | None:
        """Return None: errors carry no time of the device."""
        return None

    def rebuilt(self) -> None:
        """Do nothing: the device holds nothing that depends on communicators."""

    def inject(self, action: "FaultAction") -> None:
        """Cause a real fault of the device, in the train thread, and raise what torch does."""
        if action not in _FAULT_ACTIONS:
            possible = ", ".join(sorted(each.value for each in _FAULT_ACTIONS))
            raise ConfigurationError(f"{action} cannot be caused on a GPU; possible here: {possible}")
        _FAULT_ACTIONS[action]()
        torch.cuda.synchronize(self._index)

    def actions(self) -> Mapping[str, Callable[[Mapping[str, str]], str]]:
        """Return no action."""
        return {}


def train_small_step(device: torch.device, dtype: torch.dtype) -> None:
    """Train a step of a very small transformer, with the operators that most models use.

    CUDA loads each kernel when it is first called. Draws no random number, and changes nothing that a script sees.
    """
    size, heads, batch, time = 128, 2, 2, 16

    def parameter(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device, dtype=dtype, requires_grad=True)

    table, scale, shift = parameter(size, size), parameter(size), parameter(size)
    wide, bias, head = parameter(3 * size, size), parameter(3 * size), parameter(size, size)
    tokens = torch.zeros((batch, time), dtype=torch.long, device=device)
    x = functional.layer_norm(functional.embedding(tokens, table), (size,), scale, shift)
    split = (batch, time, heads, size // heads)
    q, k, v = (each.view(split).transpose(1, 2) for each in functional.linear(x, wide, bias).chunk(3, dim=-1))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.transpose(1, 2).reshape(batch, time, size)
    x = functional.gelu(x) + functional.relu(x) + functional.silu(x)
    loss = functional.cross_entropy(functional.linear(x, head).flatten(0, 1), tokens.flatten())
    parameters = [table, scale, shift, wide, bias, head]
    gradients = list(torch.autograd.grad(loss, parameters))
    torch.nn.utils.get_total_norm(gradients, foreach=True)
    first, second = ([torch.zeros_like(each) for each in parameters] for _ in range(2))
    steps = [torch.zeros((), device="cpu") for _ in parameters]
    rates: Any = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    with torch.no_grad():  # not an Optimizer: its first step imports torch's compiler, as the script may just do
        adamw(parameters, gradients, first, second, [], steps, foreach=True, amsgrad=False, maximize=False, **rates)
    loss.item()


def problems(environment: Mapping[str, str]) -> list[str]:
    """Return the settings under which a GPU cannot be recovered, a sentence each; empty if there are none. Pure."""
    found = []
    handling = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if handling != "0":
        found.append(
            f"TORCH_NCCL_ASYNC_ERROR_HANDLING={handling}: torch ends every process that has lost a peer. Set it to 0, "
            "or leave it out: `midstep run` sets it"
        )
    if environment.get("TORCH_NCCL_ENABLE_MONITORING", "0") not in {"0", "false"}:
        found.append(
            "TORCH_NCCL_ENABLE_MONITORING=1: torch ends a process whose watchdog waits, as it does in an abort. Set it "
            "to 0, or leave it out: `midstep run` sets it"
        )
    if environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "1":
        found.append("TORCH_NCCL_BLOCKING_WAIT=1: a wait could not be ended before its timeout. Unset it")
    return found


def _in_time(wait: Callable[[], None], limit_s: float) -> bool:
    """Return whether `wait` returned within the limit. Raises RecoveryError for what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="midstep-drain", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise RecoveryError(f"the device cannot be used any more: {_first_line(raised[0])}") from raised[0]
    return not thread.is_alive()


def _write_to_nowhere() -> None:
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)  # from torch 2.9 on
    if compile_kernel is None:
        torch.ones(1, device="cuda")[torch.full((1,), 1 << 20, device="cuda")]  # a failed assertion is as fatal
        return
    compile_kernel(_ILLEGAL_WRITE, "write_nowhere")((1, 1, 1), (1, 1, 1), (torch.ones(1, device="cuda"),))


def _take_all_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


_FAULT_ACTIONS: dict[FaultAction, Callable[[], None]] = {
    FaultAction.TASK_QUEUE_DEAD: _write_to_nowhere,
    FaultAction.OUT_OF_MEMORY: _take_all_memory,
}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def cuda_device() -> CudaDevice:
    """Return the device of a process on an NVIDIA GPU. Raises ConfigurationError without a torch built for CUDA."""
    if torch.version.cuda is None:
        raise ConfigurationError(
            f"the device cuda of the policy needs a torch that is built for CUDA, and torch {torch.__version__} is "
            "not. Install one (pip install 'midstep[cuda]'), and see `midstep doctor`."
        )
    return CudaDevice()
