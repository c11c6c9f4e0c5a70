"""DDP's gradient buckets: the same layout on every rank after a recovery, as in an undisturbed run.

DDP starts with a layout by parameter order, and rebuilds its buckets once, by the order in which rank 0's gradients
became ready in the first synchronised backward pass. Another layout adds the same numbers in another order, so a rank
that comes back needs the layout that the others have, or the run is no longer bit for bit the undisturbed one.

How it is done: DDP's own rebuild is pulled forward from the next forward pass to the end of the step in which it became
due (`settle`, before the commit barrier), so that once that step is committed every rank knows the layout. It is the
same collective on the same order, only earlier. The layout is part of the rank-local state of each commit. In a
recovery a new reducer is made, as an interrupted backward pass leaves the old one unusable: in parameter order when
nothing had been rebuilt yet; else over the parameters in the known order, with the rebuild marked as due. DDP then
rebuilds in the next forward pass on all ranks alike, from that order instead of from a backward pass.

A static graph is one step later: DDP learns the graph in its first pass and the order in its second. When just the
second step is repeated, the new reducer takes it for the first; the order is then recorded here.
"""

import dataclasses
from typing import Any, ClassVar

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...protocol.errors import UnsupportedState

_LAYOUT = "rebuilt_per_bucket_param_indices"


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The state of a layout: the order of parameters after the rebuild, and whether a static graph is known."""

    order: tuple[int, ...] | None = None
    graph_known: bool = False


@dataclasses.dataclass
class _Recorder:
    """Records in which order gradients become ready, by the last time of each."""

    handles: list[Any]
    ready: dict[int, None]

    @classmethod
    def attach(cls, parameters: list[torch.Tensor]) -> "_Recorder":
        recorder = cls([], {})
        for index, parameter in enumerate(parameters):
            hook: Any = parameter.register_post_accumulate_grad_hook
            recorder.handles.append(hook(recorder._note(index)))
        return recorder

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _note(self, index: int) -> Any:
        def note(_parameter: torch.Tensor) -> None:
            self.ready.pop(index, None)
            self.ready[index] = None

        return note


class BucketLayout:
    """The bucket layout of one DDP module; makes new reducers with it."""

    AT_START: ClassVar[bytes] = msgspec.msgpack.encode(Layout())  # captured before DDP has rebuilt its buckets

    def __init__(self, name: str, ddp: DistributedDataParallel) -> None:
        if getattr(ddp, "mixed_precision", None) is not None:
            raise UnsupportedState(
                f"{name}: DDP's own mixed precision cannot be recovered, its hooks are tied to one reducer. Use "
                "torch.autocast instead"
            )
        self._name = name
        self._ddp: Any = ddp  # much of what is needed has no public name
        self._now = Layout()
        self._made_for = Layout()  # what the present reducer was made for
        self._recorder: _Recorder | None = None
        self._encoded = msgspec.msgpack.encode(self._now)

    def capture(self) -> bytes:
        """Return how far the layout has come. Runs at each commit, after `settle`."""
        return self._encoded

    def expect(self, captured: bytes) -> None:
        """Set the layout of the step that will be repeated; `refresh` applies it. Runs in rollback."""
        self._set(msgspec.msgpack.decode(captured, type=Layout))

    def settle(self) -> None:
        """Do DDP's rebuild if it is due: a collective, on all ranks in the same step. Before the commit."""
        if self._now.order is not None or not self._has_reducer():
            return
        if self._recorder is not None and self._recorder.ready:
            self._settle_recorded(self._recorder)
            return
        if self._ddp.reducer._rebuild_buckets():
            self._ddp._has_rebuilt_buckets = True
            self._set(Layout(self._read_order()))
            self._made_for = self._now
        elif self._ddp.static_graph and self._ddp._static_graph_delay_allreduce_enqueued:
            self._set(Layout(None, True))

    def refresh(self) -> None:
        """Make a new reducer if the present one was made for another layout. End of rollback."""
        if self._made_for != self._now:
            self.renew()

    def renew(self) -> None:
        """Make a new reducer. Runs in clean, after stop: the communicators may be gone, nothing is sent here."""
        ddp = self._ddp
        if not self._has_reducer():
            return
        self._forget_recorder()
        ddp.reducer._remove_autograd_hooks()
        parameters, sparse = ddp._build_params_for_reducer()
        order = self._now.order if self._now.order is not None else range(len(parameters))
        names = ddp._build_debug_param_to_name_mapping([parameters[i] for i in order])
        ddp._ddp_init_helper([parameters[i] for i in order], [sparse[i] for i in order], names, ddp.static_graph)
        for hook, state in ddp._comm_hooks:
            ddp.logger._set_comm_hook_name(hook.__qualname__)
            dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = False
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()
        if self._now.order is not None:
            ddp.reducer._push_all_rebuilt_params()
        elif self._now.graph_known:
            self._recorder = _Recorder.attach(parameters)
        ddp._has_rebuilt_buckets = False
        ddp.require_forward_param_sync = True
        self._made_for = self._now

    def _settle_recorded(self, recorder: _Recorder) -> None:
        """Take rank 0's recorded order on all ranks, as DDP's own rebuild does. A collective."""
        parameters, _ = self._ddp._build_params_for_reducer()
        rest = [index for index in range(len(parameters)) if index not in recorder.ready]
        order = torch.tensor([*recorder.ready, *rest], device=parameters[0].device)
        dist.broadcast(order, group_src=0, group=self._ddp.process_group)
        self._set(Layout(tuple(order.tolist())))
        self.renew()

    def _read_order(self) -> tuple[int, ...]:
        self._ddp.logger.set_runtime_stats_and_log()
        indices = self._ddp.logger._get_ddp_logging_data().strs_map.get(_LAYOUT, "")
        order = tuple(int(index) for index in indices.replace(",", " ").split())
        parameters, _ = self._ddp._build_params_for_reducer()
        if sorted(order) != list(range(len(parameters))):
            raise UnsupportedState(
                f"{self._name}: torch {torch.__version__} does not say how DDP laid out its buckets (got {indices!r}), "
                "so no rank could come back with the same ones. Set find_unused_parameters=True: DDP then never "
                "changes them"
            )
        return order

    def _set(self, layout: Layout) -> None:
        self._now = layout
        self._encoded = msgspec.msgpack.encode(layout)

    def _forget_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None

    def _has_reducer(self) -> bool:
        return not (self._ddp._use_python_reducer or self._ddp._delay_all_reduce_all_params)
