"""Memory for state that arrives: apart from each other, and not searched for when it is written."""

import mmap
import resource

import pytest
import torch

from midstep.processor.prefault import LEAST_BYTES, PrefaultedMemory, aligned

MIB = 1024 * 1024


def test_what_is_given_out_can_be_used_apart_from_each_other() -> None:
    room = PrefaultedMemory(LEAST_BYTES)
    tensors = [room.empty((3, 5), torch.float32), room.empty((7,), torch.int64)]
    tensors += [room.empty((1000,), torch.bfloat16), room.empty((), torch.float64)]
    del room
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # it is saved by itself, not with the whole room
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 5), (7,), (1000,), ()]


def test_all_that_was_reserved_can_be_given_out() -> None:
    shapes = [(1024, 1023), (5,), (1024, 1025), (0, 3), (1,)]
    room = PrefaultedMemory(sum(aligned(4 * torch.Size(shape).numel()) for shape in shapes))
    assert room._memory is not None
    tensors = [room.empty(shape, torch.float32) for shape in shapes]
    assert room._used == room.size_bytes
    assert [tuple(tensor.shape) for tensor in tensors] == shapes


def test_what_does_not_fit_is_taken_from_elsewhere() -> None:
    room = PrefaultedMemory(LEAST_BYTES)
    first, second = room.empty((LEAST_BYTES,), torch.uint8), room.empty((LEAST_BYTES,), torch.uint8)
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all()


def test_what_does_not_fit_is_host_memory_whatever_a_scripts_default_device_is() -> None:
    torch.set_default_device("meta")
    try:
        tensor = PrefaultedMemory(0).empty((4,), torch.float32)
    finally:
        torch.set_default_device(None)
    assert tensor.device.type == "cpu"


@pytest.mark.parametrize("size", [0, 1000])
def test_little_memory_comes_as_ever(size: int) -> None:
    room = PrefaultedMemory(size)
    assert room._memory is None
    assert room.empty((2, 2), torch.float32).shape == (2, 2)


def test_memory_is_there_before_it_is_written() -> None:
    room = PrefaultedMemory(16 * MIB)
    assert room._thread is not None
    room._thread.join()
    tensor = room.empty((16 * MIB,), torch.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    tensor.fill_(1)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 16 * MIB // mmap.PAGESIZE // 10


def test_what_is_written_while_memory_is_being_got_stays() -> None:
    room = PrefaultedMemory(64 * MIB)
    assert room._thread is not None
    tensors = [room.empty((MIB,), torch.uint8) for _ in range(64)]
    for number, tensor in enumerate(reversed(tensors)):  # towards the thread
        tensor.fill_(number)
    room._thread.join()
    assert all((tensor == number).all() for number, tensor in enumerate(reversed(tensors)))


def test_a_closed_room_has_no_thread_and_leaves_its_tensors_good() -> None:
    room = PrefaultedMemory(64 * MIB)
    tensor = room.empty((64 * MIB,), torch.uint8)
    room.close()
    assert room._thread is not None
    assert not room._thread.is_alive()
    del room
    assert (tensor.fill_(3) == 3).all()


def test_a_kernel_that_is_slow_to_find_big_pages_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def slow_clock() -> float:
        asked.append(0.1)
        return sum(asked)

    advice: list[tuple[int, ...]] = []

    class Memory(mmap.mmap):
        def madvise(self, *how: int) -> None:
            advice.append(how)

    monkeypatch.setattr("midstep.processor.prefault.time.thread_time", slow_clock)
    monkeypatch.setattr("midstep.processor.prefault.mmap.mmap", Memory)
    room = PrefaultedMemory(16 * MIB)
    assert room._thread is not None
    room._thread.join()
    assert advice == [(mmap.MADV_HUGEPAGE,), (mmap.MADV_NOHUGEPAGE, 2 * MIB)]
