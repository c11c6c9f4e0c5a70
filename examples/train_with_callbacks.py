"""The resilient training with two callbacks of its own: what midstep does not know of takes part in a recovery.

Batches come from a thread of the script's own, and rank 0 keeps a log of losses. When something breaks, `stop` ends the
thread, so that nothing waits for a batch for ever; `rollback` sets both back to the step that will be repeated, so that
the log has each step exactly once. Start it with `midstep run examples/train_with_callbacks.py LOG`.
"""

import json
import queue
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import midstep

STEPS = 60
BATCH = 16
AHEAD = 4


class Feed:
    """Makes batches ahead, in a thread, each from the number of its step and its rank alone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._batches: queue.Queue[torch.Tensor | None] = queue.Queue(AHEAD)
        self._ended = threading.Event()

    def go_to(self, step: int) -> None:
        """Begin again, with the batch of `step`."""
        self.stop()
        self._batches, self._ended = queue.Queue(AHEAD), threading.Event()
        threading.Thread(target=self._fill, args=(step, self._batches, self._ended), daemon=True).start()

    def stop(self) -> None:
        """End the thread, and wake a thread that waits for a batch. Any thread; may be called again."""
        self._ended.set()
        while not self._batches.empty():  # makes room for the word that wakes
            self._batches.get()
        self._batches.put(None)

    def next(self) -> torch.Tensor:
        """Return the next batch. Raises RuntimeError once the feed was stopped."""
        batch = self._batches.get()
        if batch is None:
            raise RuntimeError("the feed was stopped")
        return batch

    def _fill(self, step: int, batches: "queue.Queue[torch.Tensor | None]", ended: threading.Event) -> None:
        while not ended.is_set():
            draw = torch.Generator().manual_seed(step * 1000 + self._rank)
            batches.put(torch.randn(BATCH, 8, generator=draw))
            step += 1


def forget_from(log: Path, step: int) -> None:
    """Take the lines of `step` and later ones out of the log: these steps will be done again."""
    if log.exists():
        lines = [line for line in log.read_text().splitlines(keepends=True) if json.loads(line)["step"] < step]
        log.write_text("".join(lines))


def main() -> None:
    """Train for STEPS steps, whatever happens to single processes."""
    midstep.init_process_group()
    log, rank = Path(sys.argv[1]), dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = midstep.TrainState(model=model, optimizer=optimizer)
    feed = Feed(rank)
    feed.go_to(0)

    def stop(recovery: midstep.Recovery) -> None:
        feed.stop()
        recovery.default()

    def rollback(recovery: midstep.Recovery) -> None:
        recovery.default()
        feed.go_to(recovery.step)
        if rank == 0:
            forget_from(log, recovery.step)

    @midstep.resilient(state, lifecycle=midstep.Lifecycle(stop=stop, rollback=rollback))
    def train() -> None:
        for step in state.steps(STEPS):
            optimizer.zero_grad()
            batch = feed.next()
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if rank == 0:  # before the update: a step that any rank has committed has its line by then
                with log.open("a") as lines:
                    lines.write(json.dumps({"step": step.index, "loss": loss.item()}) + "\n")
            with step.update():
                optimizer.step()

    train()
    feed.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
