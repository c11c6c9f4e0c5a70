"""Buffers that change are found; those that do not are not captured."""

import torch
from torch import nn

from midstep.processor.buffers import FULL_CHECKS, SMALL_BYTES, BufferWatch


class _Layer(nn.Module):
    mask: torch.Tensor
    big: torch.Tensor
    codes: torch.Tensor
    late: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("big", torch.zeros(SMALL_BYTES))
        self.register_buffer("codes", torch.zeros(3))


def _names(watch: BufferWatch) -> set[str]:
    return {name.removeprefix("m.") for name in watch.capture()}


_NORM = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_running_statistics_are_captured_from_the_start_and_constants_are_not() -> None:
    """A mask stays out, however often it is looked at."""
    watch = BufferWatch({"m": _Layer()})
    for _ in range(FULL_CHECKS + 3):
        assert _names(watch) == _NORM


def test_a_buffer_counts_as_changing_from_its_first_change_on() -> None:
    """Also when it is written through .data, and also when it changes back."""
    layer = _Layer()
    watch = BufferWatch({"m": layer})
    assert _names(watch) == _NORM
    layer.codes.data[0] = 1.0
    assert _names(watch) == _NORM | {"codes"}
    layer.codes.data[0] = 0.0
    assert _names(watch) == _NORM | {"codes"}


def test_a_broadcast_that_changes_nothing_is_no_change() -> None:
    """DDP writes every buffer in every forward pass; the version moves, the content does not."""
    layer = _Layer()
    watch = BufferWatch({"m": layer})
    for _ in range(FULL_CHECKS + 3):
        for buffer in layer.buffers():
            buffer.copy_(buffer.clone())
        assert _names(watch) == _NORM


def test_a_late_change_of_a_big_buffer_is_found_by_its_version() -> None:
    """Content is not compared any more then."""
    layer = _Layer()
    watch = BufferWatch({"m": layer})
    for _ in range(FULL_CHECKS + 1):
        watch.capture()
    layer.big[7] = 1.0
    assert "big" in _names(watch)


def test_a_buffer_that_was_replaced_by_another_object_is_found() -> None:
    """Assigning a new tensor to the attribute is a change too."""
    layer = _Layer()
    watch = BufferWatch({"m": layer})
    layer.codes = torch.ones(3)
    assert "codes" in _names(watch)


def test_a_change_in_the_interrupted_step_is_undone_though_nobody_knew_of_it() -> None:
    """What was not captured goes back to what it was at registration."""
    layer = _Layer()
    watch = BufferWatch({"m": layer})
    captured = {name: tensor.clone() for name, tensor in watch.capture().items()}
    layer.norm(torch.randn(3, 2))
    layer.codes.data.add_(5)
    watch.restore(captured)
    assert torch.equal(layer.codes, torch.zeros(3))
    assert layer.norm.num_batches_tracked == 0
    assert layer.norm.running_mean is not None
    assert torch.equal(layer.norm.running_mean, torch.zeros(2))


def test_another_rank_baseline_is_written_and_becomes_the_own() -> None:
    """A newcomer cannot know constants that were drawn at random."""
    source, target = _Layer(), _Layer()
    source.mask.mul_(3)
    here = BufferWatch({"m": target})
    here.adopt_baseline(BufferWatch({"m": source}).baseline())
    assert torch.equal(target.mask, source.mask)
    assert _names(here) == _NORM


def test_buffers_that_appear_later_are_watched_and_made_in_a_newcomer() -> None:
    """Caches that a forward pass registers."""
    layer, newcomer = _Layer(), _Layer()
    watch = BufferWatch({"m": layer})
    layer.register_buffer("late", torch.zeros(2))
    assert "late" not in _names(watch)
    layer.late.add_(1)
    captured = watch.capture()
    BufferWatch({"m": newcomer}).restore(captured)
    assert torch.equal(newcomer.late, torch.ones(2))
