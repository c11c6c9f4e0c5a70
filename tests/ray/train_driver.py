"""A run of Ray Train whose only worker starts a job: `train_driver.py FILE`, with the options of `midstep.ray.run`."""

import sys
from pathlib import Path
from typing import Any

import driver  # type: ignore[import-not-found]  # beside this file in the folder that Ray copies
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def work(options: dict[str, Any]) -> None:
    """Run the job in the worker, and fail as the job does. Ray Train has given the worker another directory."""
    code = driver.main({**options, "working_directory": str(Path(driver.__file__).parent)})
    if code != 0:
        raise RuntimeError(f"the job ended with exit code {code}")


if __name__ == "__main__":
    options = driver.read_options(sys.argv[1])
    trainer = DataParallelTrainer(
        work,
        train_loop_config=options,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name="train", storage_path=options["storage_path"]),
    )
    trainer.fit()
