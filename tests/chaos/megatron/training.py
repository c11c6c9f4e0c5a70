"""A GPT on megatron-core, small, in every shape that the tests of this folder want.

Runs under `midstep run`: `training.py RECORDS SHAPE`, SHAPE being a `Shape` as JSON. Dropout draws from Megatron's
tracker, the scheduler warms up, gradients are clipped. Each rank writes down the loss and gradient norm of each step as
exact bits with a digest of what its optimizer holds, and at the end a digest of everything.
"""

import copy
import functools
import json
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

import midstep
from midstep.adapters.megatron import FromSample, resilient, skip_initial_values
from midstep.testing.megatron_on_cpu import use_cpu

SEQUENCE, VOCABULARY, MICRO_BATCH = 8, 64, 2
SEEN_S = 0.6
warnings.filterwarnings("ignore")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How to train."""

    world: int = 4
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    experts: int | None = None
    distributed: bool = False
    instances: int = 1
    bf16: bool = False
    fp16: bool = False
    overlap: bool = False
    micro_batches: int = 2
    ramp_up: tuple[int, int, int] | None = None
    steps: int = 40
    layers: int = 2
    dropout: float = 0.1
    replica: str | None = None
    prints_at: int | None = None  # the iteration in which the last rank says once that a link is down
    bad: tuple[int, ...] = ()  # global batches, by number, with which the last rank fails
    fails: str = "diverges"  # its loss is no number then; or `oom`: it lacks memory
    left_out: tuple[int, ...] = ()  # global batches that the data never had
    reports: bool = False  # the loss of each micro-batch
    device: str = "cpu"  # elsewhere the script has made `torch.cuda` mean it

    @property
    def batch(self) -> int:
        """Samples of a global batch, where it does not ramp up."""
        return MICRO_BATCH * self.micro_batches * self.world // (self.tensor * self.pipeline * self.context)


def batches(shape: Shape, consumed: int) -> Iterator[Any]:
    """Yield the micro-batches of this data parallel rank from a sample on."""
    from megatron.core import parallel_state as ps

    rank, size = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
    while True:
        draw = torch.Generator().manual_seed(1_000_000 + among_all(shape, consumed) + rank * MICRO_BATCH)
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=draw).to(shape.device)
        consumed += MICRO_BATCH * size
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def among_all(shape: Shape, consumed: int) -> int:
    """Return where a sample lies in the data that has all batches."""
    number = consumed // shape.batch
    for each in sorted(shape.left_out):
        number += each <= number
    return number * shape.batch + consumed % shape.batch


def _known(kind: Any, **options: Any) -> dict[str, Any]:
    """Return the options that this version of a configuration class has."""
    return {name: value for name, value in options.items() if name in kind.__dataclass_fields__}


def build(shape: Shape) -> tuple[Any, list[Any], Any, Any]:
    """Return configuration, model chunks, optimizer and scheduler."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if shape.bf16 else torch.float16 if shape.fp16 else torch.float32
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=shape.bf16,
        fp16=shape.fp16,
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        virtual_pipeline_model_parallel_size=shape.virtual,
        context_parallel_size=shape.context,
        expert_model_parallel_size=shape.expert,
        num_moe_experts=shape.experts,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    skip_initial_values(config)
    spec = get_gpt_layer_local_spec(num_experts=shape.experts)
    if shape.context > 1:
        spec.submodules.self_attention.submodules.core_attention = local_attention()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=shape.distributed,
        num_distributed_optimizer_instances=shape.instances,
        overlap_grad_reduce=shape.overlap,
        overlap_param_gather=shape.overlap and shape.distributed,
        bucket_size=4000 if shape.overlap else None,
        grad_reduce_in_fp32=shape.bf16 or shape.fp16,
    )
    chunks = []
    for stage in range(shape.virtual or 1):
        virtual = {"vp_stage": stage} if shape.virtual else {}
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=not shape.virtual, **virtual),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=not shape.virtual, **virtual),
            share_embeddings_and_output_weights=True,
            **virtual,
        )
        if shape.bf16 or shape.fp16:
            model = Float16Module(config, model)
        model = model.to(shape.device)
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=stage > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            min_lr=0.001,
            weight_decay=0.1,
            bf16=shape.bf16,
            fp16=shape.fp16,
            initial_loss_scale=2.0**22,  # the first steps of fp16 overflow, and are skipped
            loss_scale_window=3,
            hysteresis=1,
            params_dtype=dtype,
            clip_grad=1.0,
            use_distributed_optimizer=shape.distributed,
            **_known(OptimizerConfig, overlap_param_gather=shape.overlap and shape.distributed),  # not in 0.12
        ),
        chunks,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=100,
        lr_decay_steps=2000,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=2000,
        wd_incr_style="linear",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if shape.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if shape.virtual else chunks[0].no_sync
        if shape.distributed:
            starts = [chunk.start_param_sync for chunk in chunks]
            config.param_sync_func = starts if shape.virtual else starts[0]
    return config, chunks, optimizer, scheduler


def local_attention() -> Any:
    """Return an attention that stays in this rank's part of the sequence: Megatron's own for parts needs a GPU."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LocalAttention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, **options)

    return LocalAttention


def forward_step(shape: Shape, fails: str, iterator: Iterator[Any], model: Any) -> Any:
    """Compute one micro-batch."""
    from megatron.core import parallel_state as ps

    tokens, labels = next(iterator)
    if fails == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 TiB")
    parts, part = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
    positions = torch.arange(SEQUENCE, device=shape.device).unsqueeze(0).expand(MICRO_BATCH, -1)
    if parts > 1:
        tokens, labels, positions = (each.chunk(parts, dim=1)[part] for each in (tokens, labels, positions))
    length = tokens.shape[1]
    mask = torch.tril(torch.ones(1, 1, length, length, device=shape.device)) < 0.5
    out = model(tokens, positions, mask, labels=labels)

    def loss(output: torch.Tensor) -> Any:
        mean = output.float().mean() * (math.nan if fails == "diverges" else 1.0)
        if shape.reports:
            midstep.report(loss=mean)
        return mean, {"loss": mean.detach().clone()}

    return out, loss


def train(  # noqa: PLR0917 - that is what it works with
    records: Path,
    shape: Shape,
    config: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    data_iterator: Any,
    iteration: int = 0,
    consumed_samples: int = 0,
) -> None:
    """Train, as one does on megatron-core alone."""
    from megatron.core.num_microbatches_calculator import (
        get_current_running_global_batch_size,
        get_num_microbatches,
        update_num_microbatches,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    while iteration < shape.steps:
        while (records / f"gate.{iteration}").exists():
            time.sleep(0.02)
        update_num_microbatches(consumed_samples, consistency_check=False)
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        random.random()
        is_bad = dist.get_rank() == shape.world - 1 and consumed_samples // shape.batch in shape.bad
        losses = get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, shape, shape.fails if is_bad else ""),
            data_iterator=data_iterator,
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        if iteration == shape.prints_at and dist.get_rank() == shape.world - 1:
            say_once(records, f"link 3 of rank {dist.get_rank()} is down")
        success, norm, _ = optimizer.step()
        samples = get_current_running_global_batch_size()
        if success:
            scheduler.step(increment=samples)
        loss = float(torch.stack([each["loss"] for each in losses]).mean()) if losses else 0.0
        with (records / f"steps.{dist.get_rank()}").open("a") as record:
            told = f"{loss.hex()}/{0.0 if norm is None else float(norm).hex()}/{scheduler.num_steps}/{samples}"
            record.write(f"{iteration} {told} {digest(held(optimizer))}\n")
        iteration += 1
        consumed_samples += samples


def say_once(records: Path, line: str) -> None:
    """Print a line, and stay in this step for as long as an agent takes to see it; if this was not said before."""
    said = records / "said"
    if not said.exists():
        said.touch()
        print(line, flush=True)
        time.sleep(SEEN_S)


def held(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return what the optimizers hold as named tensors: parameters that they update, and their state."""
    found = {}
    for index, leaf in enumerate(optimizer.chained_optimizers):
        for group_index, group in enumerate(leaf.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                name = f"{index}.{group_index}.{position}"
                found[name] = parameter.detach()
                found |= {f"{name}.{key}": item for key, item in leaf.optimizer.state[parameter].items()}
    return found


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of all tensors, bit for bit."""
    hashed = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode())
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def main(records: Path, shape: Shape) -> None:
    """Set everything up as a Megatron script does, train, and write down how it ended."""
    if shape.device == "cpu":
        use_cpu()
    run = resilient(replica=shape.replica)(train)
    from megatron.core import parallel_state as ps
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    ps.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        virtual_pipeline_model_parallel_size=shape.virtual,
        context_parallel_size=shape.context,
        expert_model_parallel_size=shape.expert,
        num_distributed_optimizer_instances=shape.instances,
    )
    torch.manual_seed(1234 + 100 * ps.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(1234)
    random.seed(dist.get_rank())
    size = ps.get_data_parallel_world_size()
    full = MICRO_BATCH * size * shape.micro_batches
    ramp_up = None if shape.ramp_up is None else list(shape.ramp_up)
    init_num_microbatches_calculator(dist.get_rank(), ramp_up, full, MICRO_BATCH, size)
    config, chunks, optimizer, scheduler = build(shape)
    iterators: Any = [FromSample(lambda consumed: batches(shape, consumed)) for _ in chunks]
    run(records, shape, config, chunks, optimizer, scheduler, iterators if shape.virtual else iterators[0])
    if shape.overlap and shape.distributed:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    parameters = {f"{i}.{name}": p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    end = {
        "parameters": digest(parameters),
        "optimizer": digest(held(optimizer)),
        "random numbers": digest({"torch": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}),
        "python's random numbers": random.random().hex(),
        "learning rates": [float(group["lr"]).hex() for group in optimizer.param_groups],
        "data": digest(dict(enumerate_tensors(iterators))),
        "pid": os.getpid(),
    }
    (records / f"end.{dist.get_rank()}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


def enumerate_tensors(iterators: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the next batch of each iterator, by name: the position in the data shows in it."""
    for index, iterator in enumerate(iterators):
        yield str(index), next(iterator)[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Shape))
