"""The parts of the Megatron adapter that need no Megatron job: data, names, the groups that objects hold, refusals."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from midstep.adapters.megatron import FromSample, Replica, resilient
from midstep.adapters.megatron.features import REFUSALS, refuse_unsupported
from midstep.adapters.megatron.live_groups import _walk
from midstep.adapters.megatron.parts import Parts, find_parts
from midstep.adapters.megatron.versions import check_version
from midstep.communicators.gloo import GlooCommunicator
from midstep.protocol.errors import ConfigurationError


class Anything:
    """An object with whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def parts(**changes: dict[str, Any]) -> Parts:
    """Return parts whose configurations have nothing unusual but the changes."""
    chunk = Anything(config=Anything(**changes.get("model", {})), ddp_config=Anything(**changes.get("ddp", {})))
    optimizer = Anything(config=Anything(**changes.get("optimizer", {})), chained_optimizers=[])
    return Parts((chunk,), optimizer, None, {}, 0, None, 0)


def test_an_iterator_from_a_sample_goes_on_where_it_is_put() -> None:
    """It is built anew, with the samples that have been consumed."""

    def build(consumed: int) -> Iterator[int]:
        return iter(range(consumed, consumed + 100))

    batches = FromSample(build, 10)
    assert [next(batches), next(batches)] == [10, 11]
    batches.rebuild(40)
    assert next(batches) == 40


def test_all_that_is_missing_is_named_at_once() -> None:
    """A train function without model, optimizer and iteration is told of all three."""

    def train(data: list[int]) -> None:
        """Train on nothing."""

    with pytest.raises(ConfigurationError) as error:
        find_parts(train, {"data": [1]})
    assert all(word in str(error.value) for word in ("train(data)", "the model", "one optimizer", "`iteration`"))


def test_an_unknown_kind_of_replica_is_refused_with_those_that_there_are() -> None:
    """The error names all kinds."""
    with pytest.raises(ConfigurationError, match=r"'disk'; it can be 'instances', 'buddy_device', 'none'"):
        resilient(replica="disk")(lambda iteration: None)
    assert Replica("none") is Replica.NONE


def test_a_usual_configuration_is_not_refused() -> None:
    """Nothing of it is named as unsupported."""
    refuse_unsupported(parts(model={"cuda_graph_impl": "none"}))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ddp": {"use_megatron_fsdp": True}}, "FSDP"),
        ({"model": {"fp8": "hybrid"}}, "fp8"),
        ({"model": {"enable_cuda_graph": True}}, "CUDA graphs"),
        ({"optimizer": {"optimizer_cpu_offload": True}}, "optimizer_cpu_offload"),
        ({"optimizer": {"use_precision_aware_optimizer": True}}, "precision_aware"),
        ({"optimizer": {"overlap_param_gather_with_optimizer_step": True}}, "with_optimizer_step"),
        (
            {"optimizer": {"timers": Anything(_log_level=1), "barrier_with_L1_time": True}},
            "timers",
        ),
    ],
)
def test_what_cannot_be_recovered_is_refused_with_a_reason(changes: dict[str, Any], word: str) -> None:
    """The error names the feature."""
    with pytest.raises(ConfigurationError, match=word):
        refuse_unsupported(parts(**changes))


def test_every_refusal_gives_its_reason() -> None:
    """Each has a name and a sentence."""
    assert all(refusal.feature and refusal.reason for refusal in REFUSALS)


def test_groups_are_found_wherever_an_object_keeps_them() -> None:
    """In attributes, containers, closures, partial functions and bound methods."""
    from midstep.communicators.group import Group
    from midstep.communicators.life import Life

    groups = [Group(GlooCommunicator(), (0,), 0, Life(lambda: None), _timeout()) for _ in range(5)]

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
    found = {id(handle.group) for handle in _walk(root, "root", set())}
    assert found == {id(group) for group in groups}
    assert not any(group.seated for group in groups)


def test_the_installed_version_has_all_that_is_used() -> None:
    """No name is missing."""
    check_version()


def _timeout() -> Any:
    from datetime import timedelta

    return timedelta(seconds=1)
