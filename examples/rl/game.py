"""The common part of the example's two roles: the game, the network that plays it, and the messages between them.

The game: of four choices one is right, by a rule that follows from what is seen and that the network has to find.
"""

import hashlib
import io

import torch

SIGHT, CHOICES, HIDDEN = 8, 4, 32
ITERATIONS = 200
GAMES = 64  # in one iteration, by each rank of the rollout
AHEAD = 4  # iterations for which the rollout plays on with weights that it has: the lag of this off-policy loop


def build_network() -> torch.nn.Module:
    """Return the network with its initial parameters, which are the same everywhere."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(SIGHT, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CHOICES))


def play(network: torch.nn.Module, iteration: int, rank: int) -> dict[str, torch.Tensor]:
    """Play GAMES games. What is seen and chosen follows from the iteration, so that it can be played again."""
    dice = torch.Generator().manual_seed(1_000_000 * rank + iteration)
    rule = torch.randn(SIGHT, CHOICES, generator=torch.Generator().manual_seed(7))
    seen = torch.randn(GAMES, SIGHT, generator=dice)
    with torch.no_grad():
        chosen = torch.multinomial(network(seen).softmax(dim=1), 1, generator=dice).squeeze(1)
    return {"seen": seen, "chosen": chosen, "rewards": (chosen == (seen @ rule).argmax(dim=1)).float()}


def packed(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return tensors as bytes for the store."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors that another role has left in the store."""
    tensors: dict[str, torch.Tensor] = torch.load(io.BytesIO(data), weights_only=True)
    return tensors


def digest(network: torch.nn.Module) -> str:
    """Return a short hash of the parameters, bit for bit."""
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in network.parameters())).hexdigest()[:16]
