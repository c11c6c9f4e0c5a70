"""A small classifier, and the batches it learns from: what the MindSpore examples train."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

FEATURES, HIDDEN, CLASSES, BATCH = 32, 64, 8, 16
KEEP = 0.9


class Classifier(nn.Cell):  # type: ignore[misc,unused-ignore]
    """Two layers; `keep` is the dropout mask of the hidden one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(FEATURES, HIDDEN), nn.Dense(HIDDEN, CLASSES)
        self.norm = nn.LayerNorm((HIDDEN,))

    def construct(self, x: Any, keep: Any) -> Any:
        """Return the scores of the classes."""
        return self.second(self.norm(ops.relu(self.first(x))) * keep)


def random_batch() -> tuple[Any, Any, Any]:
    """Draw a batch with numpy: inputs, a dropout mask, and the class of each input."""
    x = np.random.randn(BATCH, FEATURES).astype(np.float32)
    keep = (np.random.rand(BATCH, HIDDEN) < KEEP).astype(np.float32) / KEEP
    return ms.Tensor(x), ms.Tensor(keep), ms.Tensor(np.abs(x[:, :CLASSES]).argmax(1).astype(np.int32))


def loss_and_gradients(network: Any, parameters: Any) -> Any:
    """Return a function of a batch that gives its loss and the gradients of `parameters`."""
    criterion = nn.CrossEntropyLoss()

    def forward(x: Any, keep: Any, y: Any) -> Any:
        return criterion(network(x, keep), y)

    return ms.value_and_grad(forward, None, parameters)
