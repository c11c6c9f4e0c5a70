"""The role that plays: with the weights that the trainer has published, up to AHEAD iterations in front of it.

While the trainer recovers it plays on with what it has. Where all roles begin again, each from a checkpoint of its own,
it goes to where the trainer is, which may be behind or in front of it.
"""

import torch.distributed as dist

import midstep
from midstep.examples.rl.game import AHEAD, ITERATIONS, build_network, packed, play, unpacked


def main() -> None:
    """Play ITERATIONS times GAMES games for the rank of the trainer that has the same number."""
    midstep.init_process_group()
    role, rank = midstep.role(), dist.get_rank()
    store = role.store
    network = build_network()
    state = midstep.TrainState(model=network)

    def offer(iteration: int, begin: int) -> None:
        with state.paused():  # to wait for another role is no stall
            weights = store.get(f"weights/{max(begin, iteration - AHEAD)}")
        network.load_state_dict(unpacked(weights))
        store.set(f"games/{iteration}/{rank}", packed(play(network, iteration, rank)))

    @midstep.resilient(state)
    def roll_out() -> None:
        with state.paused():
            begin, present = int(store.get("begin")), int(store.get("present"))
        for iteration in range(present, state.step):
            offer(iteration, begin)
        for step in state.steps(ITERATIONS):
            if step.index >= begin:
                offer(step.index, begin)
            with step.update():
                pass  # nothing is learned here; the step is counted, and can be repeated

    roll_out()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
