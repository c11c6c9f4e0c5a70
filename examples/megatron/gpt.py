"""A small GPT on megatron-core that learns the source of Python's standard library: what the scripts here share."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import midstep
from midstep.adapters.megatron import skip_initial_values
from midstep.examples.gpt import VOCABULARY, standard_library_text

from ...testing.megatron_on_cpu import use_cpu

MICRO_BATCH, MICRO_BATCHES = 2, 2


class Size(NamedTuple):
    """How large a model is, and how much text it sees at once."""

    layers: int
    width: int
    heads: int
    context: int


TINY = Size(layers=2, width=64, heads=4, context=64)


class Training(NamedTuple):
    """Everything that a train function works with."""

    model: Any
    optimizer: Any
    scheduler: Any
    size: Size


def start(*, tensor: int = 1, instances: int = 1) -> None:
    """Initialise torch.distributed and Megatron, as Megatron scripts do."""
    warnings.filterwarnings("ignore")  # of what is not installed: Transformer Engine, Apex
    device = midstep.device()
    if device.type == "cpu":
        use_cpu()
    else:
        torch.cuda.set_device(device)
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, num_distributed_optimizer_instances=instances
    )
    replicas = parallel_state.get_data_parallel_world_size()
    batch = MICRO_BATCH * MICRO_BATCHES * replicas
    init_num_microbatches_calculator(dist.get_rank(), None, batch, MICRO_BATCH, replicas)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)


def settings(tensor: int, size: Size) -> Any:
    """Return the model's settings, without what only an accelerator can do."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        tensor_model_parallel_size=tensor,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def build(*, tensor: int = 1, distributed: bool = False, instances: int = 1, size: Size = TINY) -> Training:
    """Build model, optimizer and learning rate scheduler."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module

    config = settings(tensor, size)
    skip_initial_values(config)  # in a process that takes another one's place
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=size.context,
    )
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        num_distributed_optimizer_instances=instances,
        grad_reduce_in_fp32=True,
    )
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, gpt.to(midstep.device())))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=distributed,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=80,
        lr_decay_steps=4000,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Training(model, optimizer, scheduler, size)


def batches(consumed_samples: int, context: int = TINY.context) -> Iterator[Any]:
    """Yield this rank's micro-batches from a sample on; which text a sample is follows from its number."""
    from megatron.core import parallel_state

    text = standard_library_text()
    rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    while True:
        draw = torch.Generator().manual_seed(consumed_samples + rank * MICRO_BATCH)
        starts = torch.randint(len(text) - context - 1, (MICRO_BATCH,), generator=draw)
        windows = torch.stack([text[begin : begin + context + 1].long() for begin in starts.tolist()])
        consumed_samples += MICRO_BATCH * replicas
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
    """Compute one micro-batch; returns the output and what makes a loss of it."""
    tokens, labels = (part.to(midstep.device()) for part in next(data_iterator))
    context = tokens.shape[1]
    positions = torch.arange(context, device=tokens.device).unsqueeze(0).expand_as(tokens)
    mask = torch.tril(torch.ones(1, 1, context, context, device=tokens.device)) < 0.5

    def loss(output: torch.Tensor) -> Any:
        mean = output.float().mean()
        return mean, {"loss": mean.detach()}

    return model(tokens, positions, mask, labels=labels), loss


def train_step(job: Training, data_iterator: Any) -> float:
    """Do one step: forward, backward, update, learning rate. Returns the loss."""
    from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size, get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func

    job.model.zero_grad_buffer()
    job.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=[job.model],
        num_microbatches=get_num_microbatches(),
        seq_length=job.size.context,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    successful, _, _ = job.optimizer.step()
    if successful:
        job.scheduler.step(increment=get_current_running_global_batch_size())
    return float(torch.stack([each["loss"] for each in losses]).mean())
