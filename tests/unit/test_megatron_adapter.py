"""The parts of the Megatron adapter that need no Megatron job: data, names, the groups that objects hold, refusals."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed as dist

from midstep import adapters
from midstep.adapters.megatron import (
    FromSample,
    Replica,
    compatibility,
    rank_local_state,
    resilient,
    skip_initial_values,
)
from midstep.adapters.megatron.compatibility import (
    GRADIENT_NORMS,
    REFUSALS,
    REFUSED_ELSEWHERE,
    check_version,
    refuse_scaling,
    refuse_unsupported,
)
from midstep.adapters.megatron.data import PositionedIterator
from midstep.adapters.megatron.parts import Parts, find_parts
from midstep.adapters.megatron.process_groups import check_default_group, refuse_foreign
from midstep.adapters.megatron.rank_local_state import RankLocalState, _check_iterators
from midstep.adapters.megatron.resilient import METHODS
from midstep.adapters.megatron.state import meets_once
from midstep.adapters.process_groups import walk_groups
from midstep.communicators.gloo.communicator import GlooCommunicator
from midstep.policies.rules import job_settings
from midstep.policies.schema import ScalePolicy, default_policy
from midstep.processor import tree
from midstep.processor.runtime import Runtime
from midstep.protocol.errors import ConfigurationError, RecoveryError


class Anything:
    """An object with whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def parts(**changes: dict[str, Any]) -> Parts:
    """Return parts whose configurations have nothing unusual but the changes."""
    chunk = Anything(config=Anything(**changes.get("model", {})), ddp_config=Anything(**changes.get("ddp", {})))
    optimizer = Anything(config=Anything(**changes.get("optimizer", {})), chained_optimizers=[])
    return Parts((chunk,), optimizer, None, {}, 0, None, 0)


@pytest.mark.parametrize("methods", [METHODS, METHODS[:1]])
def test_a_newcomer_skips_the_initial_values_that_megatron_draws(
    methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many methods as this version of megatron-core has; the parameters stay marked as it marks them."""
    monkeypatch.setattr(Runtime, "current", lambda: Anything(connected=False))
    config = Anything(**dict.fromkeys(methods, torch.nn.init.normal_))
    assert skip_initial_values(config) is config
    assert sorted(vars(config)) == sorted(methods)
    weight = torch.nn.Parameter(torch.ones(2, 3))
    for method in methods:
        getattr(config, method)(weight)
    assert weight.isnan().all()


@pytest.mark.parametrize("runtime", [None, Anything(connected=True)])
def test_all_other_processes_draw_them(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "current", lambda: runtime)
    config: Any = Anything(init_method=torch.nn.init.ones_)
    skip_initial_values(config).init_method(weight := torch.empty(2))
    assert torch.equal(weight, torch.ones(2))


def test_an_iterator_from_a_sample_goes_on_where_it_is_put() -> None:
    """It is rebuilt with the samples that have been consumed."""

    def build(consumed: int) -> Iterator[int]:
        return iter(range(consumed, consumed + 100))

    batches = FromSample(build, 10)
    assert [next(batches), next(batches)] == [10, 11]
    batches.rebuild(40)
    assert next(batches) == 40


def test_micro_batches_of_our_own_iterators_pass_through_the_hand_of_an_audit() -> None:
    """In a list and behind Megatron's iterator for reruns, too; before and behind a rebuild."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    plain, wrapped = (FromSample(lambda consumed: iter(range(consumed, 100)), 10) for _ in range(2))
    parts: Any = SimpleNamespace(
        chunks=(), iterators={"data": [plain], "more": RerunDataIterator(wrapped)}, first=0, first_consumed=0, leaves=()
    )
    state = RankLocalState(parts, None)
    assert next(plain) == 10
    state.hand_batches(lambda batch: -batch)
    assert [next(plain), next(wrapped)] == [-11, -10]
    plain.rebuild(50)
    assert next(plain) == -50


@pytest.mark.parametrize(
    ("config", "once"),
    [
        ({}, True),
        ({"overlap_param_gather": True}, False),
        ({"num_distributed_optimizer_instances": 2}, False),
    ],
)
def test_steps_that_need_another_replica_before_their_update_are_not_audited(
    config: dict[str, Any], *, once: bool
) -> None:
    """Parameters are gathered in their forward pass, or a sum over replicas is reduced again."""
    usual = {"overlap_param_gather": False, "num_distributed_optimizer_instances": 1}
    parts: Any = SimpleNamespace(chunks=[SimpleNamespace(ddp_config=SimpleNamespace(**{**usual, **config}))])
    assert meets_once(parts) is once


def test_all_that_is_missing_is_named_at_once() -> None:
    """A train function without model, optimizer and iteration is told of all three."""

    def train(data: list[int]) -> None:
        """Train on nothing."""

    with pytest.raises(ConfigurationError) as error:
        find_parts(train, {"data": [1]})
    assert all(word in str(error.value) for word in ("train(data)", "the model", "one optimizer", "`iteration`"))


def test_an_unknown_kind_of_replica_is_refused_with_those_that_there_are() -> None:
    """The error names all kinds."""
    with pytest.raises(
        ConfigurationError, match=r"'disk'; it can be 'instances', 'buddy_device', 'buddy_host', 'none'"
    ):
        resilient(replica="disk")(lambda iteration: None)
    assert Replica("none") is Replica.NONE


def test_a_usual_configuration_is_not_refused() -> None:
    """Nothing of it is named as unsupported."""
    refuse_unsupported(parts(model={"cuda_graph_impl": "none"}))


USES: dict[str, tuple[dict[str, dict[str, Any]], ...]] = {
    "Megatron FSDP (use_megatron_fsdp)": ({"ddp": {"use_megatron_fsdp": True}},),
    "overlap_param_gather_with_optimizer_step": ({"optimizer": {"overlap_param_gather_with_optimizer_step": True}},),
    "use_precision_aware_optimizer": ({"optimizer": {"use_precision_aware_optimizer": True}},),
    "optimizer_cpu_offload": ({"optimizer": {"optimizer_cpu_offload": True}},),
    "fp8 and fp4": ({"model": {"fp8": "hybrid"}}, {"model": {"fp4": "e2m1"}}),
    "CUDA graphs": (
        {"model": {"enable_cuda_graph": True}},
        {"model": {"external_cuda_graph": True}},
        {"model": {"cuda_graph_impl": "local"}},
    ),
    "fused operators with a collective in them (use_ascend_mc2, use_ascend_coc of MindSpeed)": (
        {"model": {"use_ascend_mc2": True}},
        {"model": {"use_ascend_coc": True}},
    ),
    "timers with barriers inside the optimizer (timing_log_level above 0 with barrier_with_L1_time)": (
        {"optimizer": {"timers": Anything(_log_level=1), "barrier_with_L1_time": True}},
    ),
}
BY_OTHER_TESTS = {
    "optimizers other than FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer",
    "the rerun state machine in another mode than disabled",
}
EACH = [(feature, changes) for feature, uses in USES.items() for changes in uses]


@pytest.mark.parametrize(("feature", "changes"), EACH)
def test_what_cannot_be_recovered_is_refused_with_a_reason(feature: str, changes: dict[str, Any]) -> None:
    """The error names the feature, and why."""
    with pytest.raises(ConfigurationError) as error:
        refuse_unsupported(parts(**changes))
    assert next(f"{each.feature}: {each.reason}" for each in REFUSALS if each.feature == feature) in str(error.value)


def test_an_optimizer_that_is_not_known_is_refused() -> None:
    """What it keeps, and where, could be anything."""
    some = parts()
    some.optimizer.chained_optimizers.append(Anything())
    with pytest.raises(ConfigurationError, match="optimizers other than"):
        refuse_unsupported(some)


def test_the_rerun_state_machine_is_refused_unless_it_is_disabled() -> None:
    """It would repeat steps by itself."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    machine = get_rerun_state_machine()
    before = machine.get_mode()
    machine.set_mode(RerunMode.VALIDATE_RESULTS)
    try:
        with pytest.raises(ConfigurationError, match="rerun state machine"):
            refuse_unsupported(parts())
    finally:
        machine.set_mode(before)


def test_every_refusal_has_a_test() -> None:
    """A new one without is seen here."""
    assert {refusal.feature for refusal in REFUSALS} == USES.keys() | BY_OTHER_TESTS


def test_a_world_of_another_size_is_refused() -> None:
    """A policy that would let the job go on with fewer nodes is told so before the first step, and what to do."""
    refuse_scaling(job_settings(default_policy(), "job"))
    smaller = msgspec.structs.replace(default_policy(), scale=ScalePolicy(min_nodes=1))
    with pytest.raises(ConfigurationError, match=r"scale\.min_nodes .* is not possible with Megatron"):
        refuse_scaling(job_settings(smaller, "job"))


def test_an_iterator_that_cannot_be_put_back_is_refused() -> None:
    """A plain generator has no position."""
    with pytest.raises(ConfigurationError, match="argument `data_iterator` is a list_iterator, which cannot be put"):
        _check_iterators({"data_iterator": iter([1, 2])})


def test_a_group_on_another_backend_is_refused(tmp_path: Path) -> None:
    """It could not be reconnected, and where it is held is named."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        some = parts()
        some.chunks[0].dp_group = dist.group.WORLD
        with pytest.raises(ConfigurationError, match=r"model\[0\]\.dp_group is a process group on"):
            refuse_foreign(some)
        with pytest.raises(ConfigurationError, match="before the train function was decorated"):
            check_default_group()
    finally:
        dist.destroy_process_group()


def test_a_version_that_lacks_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is missing, and the versions that have it."""
    monkeypatch.setitem(compatibility.NAMES, "megatron.core.parallel_state", ("create_group", "no_such_function"))
    with pytest.raises(ConfigurationError, match=r"lacks megatron\.core\.parallel_state\.no_such_function"):
        check_version()


@pytest.mark.parametrize("name", GRADIENT_NORMS)
def test_a_version_without_what_computes_the_gradient_norm_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its hook would find nothing to replace."""
    monkeypatch.delattr(f"megatron.core.optimizer.optimizer.MegatronOptimizer.{name}")
    with pytest.raises(ConfigurationError, match=rf"lacks megatron\.core\..*MegatronOptimizer\.{name}"):
        check_version()


def local_state(first: int = 0, consumed: int = 0, iterators: Any = None) -> RankLocalState:
    """Return the rank-local state of a rank whose train function has begun at this iteration."""
    some = dataclasses.replace(parts(), first=first, first_consumed=consumed, iterators=iterators or {})
    some.chunks[0].module = torch.nn.Linear(1, 1)
    some.chunks[0].bucket_groups = some.chunks[0].expert_parallel_bucket_groups = []
    return RankLocalState(some, None)


def test_a_newcomer_counts_iterations_from_where_the_job_began() -> None:
    """Its script may have loaded a checkpoint that was written since."""
    newcomer = local_state(first=140, consumed=1120)
    newcomer.restore(local_state(first=100, consumed=800).capture())
    assert (newcomer.first, newcomer.consumed) == (100, 800)


class Positioned(PositionedIterator):
    """An iterator of Megatron-LM's loaders, without the loader."""

    def __init__(self, consumed: int) -> None:
        self._consumed, self._build = consumed, lambda at: iter(range(at, at + 100))

    def __next__(self) -> Any:
        raise AssertionError


def test_batches_are_left_out_of_what_stands_at_the_consumed_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of training data in any number of model chunks; validation data, which stands elsewhere, stays there."""
    monkeypatch.setattr(rank_local_state, "batch_size", lambda: 8)
    chunks, valid = [Positioned(808), Positioned(808), None], Positioned(32)
    own = local_state(consumed=800, iterators={"train_data_iterator": chunks, "valid_data_iterator": valid})
    assert own.handed_out == {"batches": 0}
    own.updating(skipped=False)
    assert own.handed_out == {"batches": 1}
    own.restore(own.advanced(own.capture(), {"batches": 2}))
    assert own.consumed == 824
    assert [each.state_dict() for each in (*chunks, valid) if each] == [
        {"consumed_samples": samples} for samples in (824, 824, 32)
    ]


@pytest.mark.parametrize(("iterators", "samples"), [({}, 8), ({"data": FromSample(lambda _: iter(()))}, 0)])
def test_how_many_samples_a_batch_has_must_be_known_to_leave_one_out(
    iterators: dict[str, Any], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step did not end; a rule on values breaks at its end, and needs no more than its positions."""
    monkeypatch.setattr(rank_local_state, "batch_size", lambda: samples)
    assert local_state(iterators=iterators).handed_out is None


def test_param_groups_that_only_some_stages_have_are_refused() -> None:
    """A newcomer that has built other groups than its earlier process cannot take its state."""
    own = local_state()
    blob = tree.pack({**tree.unpack(own.capture()), "groups": [[{}]]}, "state")
    with pytest.raises(RecoveryError, match="other param groups"):
        own.restore(blob)


def test_the_documentation_lists_what_is_refused() -> None:
    """Every row of its table is a refusal of the code, and the other way round."""
    text = (Path(adapters.__file__).parents[1] / "docs" / "megatron.md").read_text()
    section = text.split("## What is refused", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1].strip().replace("`", "") for line in section.splitlines() if line.startswith("|")]
    assert sorted(rows[2:]) == sorted([refusal.feature for refusal in REFUSALS] + list(REFUSED_ELSEWHERE))


def test_every_refusal_gives_its_reason() -> None:
    """Each has a name and a sentence."""
    assert all(refusal.feature and refusal.reason for refusal in REFUSALS)


def test_groups_are_found_wherever_an_object_keeps_them() -> None:
    """In attributes, containers, closures, partial functions and bound methods."""
    from midstep.communicators.generation_scope import GenerationScope
    from midstep.communicators.gloo.group import GlooGroup

    groups = [GlooGroup(GlooCommunicator(), (0,), 0, GenerationScope(lambda: None), _timeout()) for _ in range(5)]

    class Owner:
        def __init__(self, group: Any) -> None:
            self.group = group

        def method(self) -> None:
            """Do nothing."""

    root = Anything(
        attribute=groups[0],
        listed=[{"deep": groups[1]}],
        partial=functools.partial(print, groups[2]),
        closure=lambda: groups[3],
        bound=Owner(groups[4]).method,
    )
    found = {id(handle.group) for handle in walk_groups(root, "root", set())}
    assert found == {id(group) for group in groups}
    assert not any(group.connected for group in groups)


def test_the_installed_version_has_all_that_is_used() -> None:
    """No name is missing."""
    check_version()


def _timeout() -> Any:
    from datetime import timedelta

    return timedelta(seconds=1)
