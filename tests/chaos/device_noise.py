"""The training of `training.py` with noise from the generator of the fake device, which is not torch's own.

Runs under `midstep run`: `device_noise.py RECORDS STEPS STEP_S [forget]`. With `forget`, nothing puts that generator
back: the test that its numbers come back has to notice.
"""

import sys
from pathlib import Path

import torch
from training import augmented, train  # type: ignore[import-not-found]

from midstep.devices import fake
from midstep.devices.npu import NpuDevice


def noisy(samples: torch.Tensor) -> torch.Tensor:
    """Augment a batch as ever, and add noise of the device's."""
    generator = fake.npu.default_generators[0]
    changed: torch.Tensor = augmented(samples) + 0.01 * torch.randn(samples.shape, generator=generator)
    return changed


if __name__ == "__main__":
    if "forget" in sys.argv:
        NpuDevice.restore_random = lambda self, state: None  # type: ignore[method-assign]
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), augment=noisy)
