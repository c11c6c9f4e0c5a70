"""The role that learns: it takes what the rollout has played, and publishes the weights with which to play on.

Started by `midstep run --roles examples/rl/roles.yaml`.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.examples.rl.game import AHEAD, ITERATIONS, build_network, digest, packed, unpacked


def main() -> None:
    """Learn for ITERATIONS steps, whatever happens to single processes of either role."""
    midstep.init_process_group()
    store, rank = midstep.role().store, dist.get_rank()
    network = build_network()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = midstep.TrainState(model=model, optimizer=optimizer)

    def publish(iteration: int) -> None:
        if rank == 0:
            store.set(f"weights/{iteration}", packed(network.state_dict()))
            store.set("present", b"%d" % iteration)
            store.delete(f"weights/{iteration - 2 * AHEAD}")

    @midstep.resilient(state)
    def train() -> None:
        publish(state.step)  # again after a recovery: this rank may be new, and the one before lost before it had
        if rank == 0 and not store.has("begin"):
            store.set("begin", b"%d" % state.step)
        for step in state.steps(ITERATIONS):
            with state.paused():  # to wait for another role is no stall
                games = unpacked(store.get(f"games/{step.index}/{rank}"))
            chosen = model(games["seen"]).log_softmax(dim=1).gather(1, games["chosen"].unsqueeze(1)).squeeze(1)
            loss = -(chosen * (games["rewards"] - games["rewards"].mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            with step.update():
                optimizer.step()
            publish(step.index + 1)
            store.delete(f"games/{step.index - 1}/{rank}")  # no rank repeats a step that all have committed
            if rank == 0 and step.index % 20 == 0:
                print(f"step {step.index} won {games['rewards'].mean():.2f}", flush=True)

    train()
    if rank == 0:
        print(f"learned {digest(network)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
