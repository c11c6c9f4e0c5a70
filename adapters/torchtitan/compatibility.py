"""The supported part of torchtitan: its versions, and the features that are refused before the first step.

The adapter hooks calls and reads attributes that torchtitan does not promise to keep, so versions are named.
`docs/torchtitan.md` lists the refused features under the same names.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from ...protocol.errors import ConfigurationError
from ..fsdp.compatibility import fsdp_states

VERSIONS = ("0.2.2", "0.3.0")


def check_version() -> None:
    """Raise ConfigurationError where torchtitan is missing, or is a version that the adapter does not know."""
    known = " and ".join(VERSIONS)
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise ConfigurationError(
            f"torchtitan is not installed here: pip install 'midstep[torchtitan]'. midstep knows {known}"
        ) from None
    if found not in VERSIONS:
        raise ConfigurationError(
            f"torchtitan {found} is installed, and midstep knows {known}: the calls that it hooks may be others there. "
            f"pip install torchtitan=={VERSIONS[-1]}"
        )


def config_of(trainer: Any) -> Any:
    """Return the configuration of a trainer, which 0.2.2 has under another name."""
    return trainer.config if hasattr(trainer, "config") else trainer.job_config


class RefusedTraining(NamedTuple):
    """A way of training that cannot be recovered: how to see it, and why."""

    feature: str
    used: Callable[[Any], bool]
    reason: str


def _on_device(trainer: Any) -> bool:
    return bool(trainer.device.type != "cpu")


def _records_graphs(trainer: Any) -> bool:
    return _on_device(trainer) and not getattr(config_of(trainer).training, "disable_cuda_graphs", True)


def _checkpointer_is_strange(trainer: Any) -> bool:
    checkpointer = trainer.checkpointer
    return bool(config_of(trainer).checkpoint.enable) and type(checkpointer).__name__ != "CheckpointManager"


def _quantizes(trainer: Any) -> bool:
    config = config_of(trainer)
    if hasattr(config, "model"):  # 0.2.2
        return bool(getattr(config.model, "converters", None))
    from torchtitan.components.quantization.utils import has_quantization

    return bool(has_quantization(trainer.model_config))


def _is_ft(trainer: Any) -> bool:
    names = {kind.__name__ for part in (trainer, trainer.optimizers) for kind in type(part).__mro__}
    return any(name.startswith(("FT", "TorchFT")) for name in names) or bool(
        getattr(trainer.checkpointer, "ft_manager", None)
    )


REFUSALS = (
    RefusedTraining(
        "pipeline parallelism (parallelism.pipeline_parallel_degree)",
        lambda trainer: bool(trainer.parallel_dims.pp_enabled),
        "what an interrupted schedule leaves in its stages is not cleared away yet",
    ),
    RefusedTraining(
        "context parallelism (parallelism.context_parallel_degree)",
        lambda trainer: bool(trainer.parallel_dims.cp_enabled),
        "it was never tried",
    ),
    RefusedTraining(
        "expert parallelism (parallelism.expert_parallel_degree)",
        lambda trainer: bool(trainer.parallel_dims.ep_enabled),
        "it was never tried",
    ),
    RefusedTraining(
        "a model that is not sharded (parallelism.data_parallel_shard_degree 1, with replicas)",
        lambda trainer: not list(fsdp_states(trainer.model_parts)),
        "torchtitan then keeps reducers of its own, which an interrupted step leaves unusable. Give it a shard degree "
        "above 1",
    ),
    RefusedTraining(
        "CUDA graphs",
        _records_graphs,
        "a graph holds the links of the generation in which it was recorded. Give --training.disable_cuda_graphs",
    ),
    RefusedTraining(
        "updates in the backward pass (optimizer.early_step_in_backward)",
        lambda trainer: type(trainer.optimizers).__name__ == "OptimizersInBackwardContainer",
        "parameters then change before every rank has all gradients",
    ),
    RefusedTraining(
        "float8, MXFP8, NVFP4 and other converters of the model",
        _quantizes,
        "they reduce scales over the ranks inside the update, and keep state that was never tried",
    ),
    RefusedTraining(
        "checkpoint.async_mode async_with_pinned_mem",
        lambda trainer: (
            getattr(getattr(trainer.checkpointer, "async_mode", None), "value", "") == "async_with_pinned_mem"
        ),
        "a process of its own writes them, over a group that a recovery does not know. Use disabled or async",
    ),
    RefusedTraining(
        "checkpointers other than torchtitan's DCP CheckpointManager",
        _checkpointer_is_strange,
        "what they have under way when a rank is lost is not known",
    ),
    RefusedTraining(
        "TorchFT",
        _is_ft,
        "it answers faults itself. Take it out, midstep is in its place",
    ),
)


def refuse_unsupported(trainer: Any) -> None:
    """Raise ConfigurationError naming every feature of this trainer that cannot be recovered."""
    found = [f"{each.feature}: {each.reason}" for each in REFUSALS if each.used(trainer)]
    if found:
        raise ConfigurationError(f"torchtitan trains with what midstep cannot recover. {'; '.join(found)}")
