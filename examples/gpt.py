"""A small GPT, and a text that every machine has: the source of Python's standard library, read as bytes."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The size of the model. The default has 0.9 million parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    dropout: float = 0.1


TEN_MILLION = Shape(layers=6, heads=6, width=378, context=64, dropout=0.0)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_feed = nn.LayerNorm(shape.width)
        self.feed = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        split = (batch, time, self.heads, width // self.heads)
        attended = functional.scaled_dot_product_attention(
            q.view(split).transpose(1, 2),
            k.view(split).transpose(1, 2),
            v.view(split).transpose(1, 2),
            is_causal=True,
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + functional.dropout(self.feed(self.norm_feed(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next byte; `forward` returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Both are (batch, time) byte values."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.norm(self.blocks(self.token(inputs) + self.position(places)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def standard_library_text(limit_bytes: int = 2_000_000) -> Tensor:
    """Return the beginning of the standard library's source as byte values."""
    parts, size = [], 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit_bytes:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:limit_bytes]), dtype=torch.uint8)


def random_batch(text: Tensor, shape: Shape, size: int) -> tuple[Tensor, Tensor]:
    """Draw `size` random windows; the random numbers are torch's, so each rank has its own."""
    starts = torch.randint(len(text) - shape.context - 1, (size,))
    windows = torch.stack([text[start : start + shape.context + 1].long() for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]
