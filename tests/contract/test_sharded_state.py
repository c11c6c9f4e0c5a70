"""The train state of a model that `fully_shard` was applied to: found by itself, cleared of interrupted steps."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

import midstep
from midstep.adapters.fsdp import ShardedTrainState
from midstep.adapters.fsdp.compatibility import clear_iteration, refuse_pipelines
from midstep.adapters.fsdp.shards import RankLayout, holders_of, rehearse_update, shard_name
from midstep.protocol.errors import ConfigurationError, UnsupportedState

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Interrupt = Callable[[Any], None]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A world of one rank, which has nobody to wait for."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(**options: Any) -> Any:
    """Return two layers, each sharded, and both together."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    options = {"mesh": init_device_mesh("cpu", (1,)), **options}
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def gradients(model: Any) -> list[Any]:
    """Return the gradients of one step."""
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    return [parameter.grad.full_tensor().tolist() for parameter in model.parameters()]


def whole(model: Any) -> list[Any]:
    """Return all parameters."""
    return [parameter.full_tensor().tolist() for parameter in model.parameters()]


def stop(*_: Any) -> None:
    """Raise as a collective of a lost peer would."""
    raise RuntimeError("a peer is gone")


def in_forward(model: Any) -> None:
    """Be interrupted between the layers of a forward pass."""
    hook = model[1].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="a peer is gone"):
        model(torch.ones(2, 4))
    hook.remove()


def in_backward(model: Any) -> None:
    """Be interrupted between the layers of a backward pass."""
    middle: list[torch.Tensor] = []
    hook = model[0].register_forward_hook(lambda _layer, _inputs, output: middle.append(output))
    loss = model(torch.ones(2, 4)).sum()
    hook.remove()
    hooked: Any = middle[0]
    hooked.register_hook(stop)
    with pytest.raises(RuntimeError, match="a peer is gone"):
        loss.backward()


def in_accumulation(model: Any) -> None:
    """Be interrupted after a micro-batch whose gradients were not reduced."""
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    model(torch.ones(2, 4)).sum().backward()
    model.set_requires_gradient_sync(True)  # as the loop does in the step that it repeats
    model.set_is_last_backward(True)


@pytest.mark.parametrize("interrupt", [in_forward, in_backward, in_accumulation])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"mp_policy": BF16}])
def test_an_interrupted_step_leaves_nothing_to_the_one_that_is_repeated(
    interrupt: Interrupt, options: dict[str, Any]
) -> None:
    """Gradients are those of a model to which nothing happened, also where some were accumulated."""
    undisturbed = gradients(sharded(**options))
    model = sharded(**options)
    gradients(model)
    state = midstep.TrainState(model)
    interrupt(model)
    state.clean()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    state.rolled_back(0)
    assert gradients(model) == undisturbed


@pytest.mark.parametrize("interrupt", [in_forward, in_backward, in_accumulation])
def test_a_newcomer_that_has_trained_nothing_yet_is_cleared_as_well(interrupt: Interrupt) -> None:
    undisturbed = gradients(sharded())
    model = sharded()
    state = midstep.TrainState(model)
    state.clean()
    state.rolled_back(0)
    interrupt(model)
    state.clean()
    state.rolled_back(0)
    assert gradients(model) == undisturbed


def test_reduced_gradients_outlive_clean() -> None:
    """A rank that stood at the commit barrier may yet have to apply its update."""
    model = sharded()
    before = gradients(model)
    state = midstep.TrainState(model)
    state.clean()
    assert [parameter.grad.full_tensor().tolist() for parameter in model.parameters()] == before
    state.rolled_back(0)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of which torch has worked out how their results are sharded."""
    found: list[str] = []
    work_out = ShardingPropagator._propagate_tensor_meta_non_cached

    def note(self: Any, schema: Any) -> Any:
        found.append(str(schema.op))
        return work_out(self, schema)

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", note)
    return found


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_first_update_that_was_rehearsed_finds_everything_worked_out(kind: Any, worked_out: list[str]) -> None:
    """In the same thread: torch remembers it by thread. No hook of the script is called."""
    model = sharded()
    optimizer = kind(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a rehearsal is no step of the script"))
    state: Any = midstep.TrainState(model, optimizer)

    def begins_to_train() -> tuple[list[str], list[str]]:
        worked_out.clear()
        state.rehearse()
        rehearsed = worked_out.copy()
        optimizer._optimizer_step_pre_hooks.clear()
        gradients(model)
        worked_out.clear()
        optimizer.step()
        return rehearsed, worked_out.copy()

    with ThreadPoolExecutor(1) as fresh_thread:
        rehearsed, left = fresh_thread.submit(begins_to_train).result()
    assert rehearsed
    assert not left


def test_a_rehearsal_leaves_parameters_and_optimizer_as_they_were() -> None:
    """It works on stand-ins, which have no memory."""
    model = sharded()
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before, random_numbers = whole(model), torch.get_rng_state()
    assert not rehearse_update(optimizer)
    assert whole(model) == before
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert scheduler.last_epoch == 0


def test_only_updates_that_are_known_to_do_arithmetic_alone_are_rehearsed() -> None:
    """Another one may draw random numbers, or do collectives, in which no other rank would take part."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            pytest.fail(f"it was called with {closure}")

    model = sharded()
    for optimizer in (Own(model.parameters(), lr=0.1), torch.optim.LBFGS(torch.nn.Linear(1, 1).parameters())):
        assert "more than arithmetic" in rehearse_update(optimizer)
    state: Any = midstep.TrainState(model, Own(model.parameters(), lr=0.1))
    state.rehearse()


def test_a_rehearsal_that_fails_is_left_to_the_first_update() -> None:
    optimizer = torch.optim.Adam(sharded().parameters(), lr=0.1)
    optimizer.param_groups[0]["betas"] = None
    assert rehearse_update(optimizer).startswith("TypeError: ")


def test_one_name_finds_out_whether_modules_are_sharded() -> None:
    """Also right after a forward pass alone, which leaves parameters gathered."""
    plain = midstep.TrainState(torch.nn.Linear(2, 2))
    assert not isinstance(plain, ShardedTrainState)
    model = sharded()
    state = midstep.TrainState(model=[torch.nn.Linear(2, 2), model])
    assert isinstance(state, ShardedTrainState)
    assert isinstance(state, midstep.TrainState)
    model(torch.ones(1, 4))
    assert isinstance(midstep.TrainState(model=model), ShardedTrainState)
    assert not any("no registered module" in each for each in state.audit())


def moved(source: ShardedTrainState, destination: ShardedTrainState) -> None:
    """Move every shard, as a recovery does."""
    for hold in source.shards():
        sent = source.open_shard(hold.shard_id)
        received = destination.accept_shard(hold.shard_id, sent.header)
        for ours, theirs in zip(received.tensors, sent.tensors, strict=True):
            ours.copy_(theirs)
        destination.adopt_shard(hold.shard_id, received)


def trained(steps: int) -> tuple[Any, Any, Any, ShardedTrainState]:
    """Return a model with its optimizer, scheduler and state after so many steps."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for _ in range(steps):
        gradients(model)
        optimizer.step()
        scheduler.step()
    state = midstep.TrainState(model, optimizer, scheduler)
    assert isinstance(state, ShardedTrainState)
    return model, optimizer, scheduler, state


@pytest.mark.parametrize("own_steps", [0, 3])
def test_a_newcomer_gets_parameters_moments_and_rates_as_sharded_tensors(own_steps: int) -> None:
    """It goes on as its source does."""
    model, optimizer, _, source = trained(2)
    copy, its_optimizer, its_scheduler, state = trained(own_steps)
    moved(source, state)
    moments = its_optimizer.state[next(copy.parameters())]
    assert isinstance(moments["exp_avg"], DTensor)
    assert its_scheduler.get_last_lr() == [0.025]
    for each, its in ((model, optimizer), (copy, its_optimizer)):
        gradients(each)
        its.step()
    assert whole(copy) == whole(model)
    assert state.digests() == source.digests()


def test_what_cannot_be_recovered_is_refused_in_one_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests run without torch's compiler, which says what a module is compiled into."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    model[0].set_allocate_memory_from_process_group_for_comm(True)
    model[1].compile(mode="reduce-overhead")
    muon = type("DistMuon", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError) as raised:
        midstep.TrainState(model, muon)
    for part in ("CPUOffloadPolicy", "ProcessGroupAlloc", "CUDA graphs", "DistMuon"):
        assert part in str(raised.value)


def test_a_stage_of_a_pipeline_is_refused_before_training() -> None:
    """In its first step a schedule would exchange shapes with a newcomer, and with no other rank."""
    model = sharded()
    state = midstep.TrainState(model)
    refuse_pipelines()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    try:
        with pytest.raises(ConfigurationError, match=r"torch\.distributed\.pipelining"):
            state.bind(cast(Any, None))
    finally:
        del stage
        gc.collect()  # no other test has one


def test_other_ways_to_shard_are_refused_with_the_way_to_this_one() -> None:
    with pytest.raises(ConfigurationError, match=r"FSDP1 flattens.*fully_shard"):
        midstep.TrainState(FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu")))
    engine = type("DeepSpeedEngine", (torch.nn.Module,), {})()
    with pytest.raises(ConfigurationError, match=r"ZeRO.*fully_shard"):
        midstep.TrainState(engine)


def test_an_optimizer_with_a_state_dict_of_its_own_is_refused() -> None:
    model = sharded()
    own = type("Own", (torch.optim.SGD,), {"state_dict": lambda self: {}})(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="of its own"):
        midstep.TrainState(model, own)


def test_state_that_is_cut_otherwise_than_its_parameter_is_refused() -> None:
    model, optimizer, _, state = trained(1)
    first = next(iter(model.parameters()))
    optimizer.state[first]["rows"] = DTensor.from_local(torch.ones(2), first.device_mesh, first.placements)
    with pytest.raises(UnsupportedState, match="rows"):
        state.digests()


def test_holders_differ_where_a_parameter_is_replicated() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    assert holders_of(next(iter(model.parameters())), "it") == (0,)
    assert shard_name((0, 2)) == "sharded.rank0-2"
    assert len(shard_name(tuple(range(1000)))) < 64


@pytest.mark.parametrize(
    ("ranks", "said"),
    [((1,), "only rank 1"), ((0, 1), "ranks 0, 1 hold are on one node"), ((1, 3), None), ((0, 1, 2, 3), None)],
)
def test_the_layout_check_says_what_the_loss_of_a_node_would_take(ranks: tuple[int, ...], said: str | None) -> None:
    """Four ranks on two nodes."""
    found = RankLayout(world_size=4, ranks_per_node=2).findings({"a shard": ranks})
    assert found == () if said is None else said in found[0]


def test_resetting_twice_changes_nothing() -> None:
    model = sharded()
    before = gradients(model)
    clear_iteration([model])
    clear_iteration([model])
    assert gradients(model) == before
