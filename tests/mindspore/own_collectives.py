"""A training with MindSpore's own communication: its `init`, its all-reduce. It knows no midstep, and no launcher.

Arguments: RECORDS STEPS. It waits as long as there is a file `gate.STEP`.
"""

import json
import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.communication import get_group_size, get_rank, init

RECORDS, STEPS = Path(sys.argv[1]), int(sys.argv[2])
ms.set_device("CPU")
init()
RANK = get_rank()
total = ops.AllReduce()
for step in range(STEPS):
    added = total(ms.Tensor(np.full(4, RANK + step, np.float32))).asnumpy()
    with (RECORDS / f"sums.{RANK}").open("a") as file:
        print(step, int(added[0]), os.getpid(), file=file, flush=True)
    while (RECORDS / f"gate.{step}").exists():
        time.sleep(0.02)
names = ("MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "RANK_ID", "RANK_SIZE", "DEVICE_ID", "MS_ENABLE_RECOVERY")
(RECORDS / f"end.{RANK}.json").write_text(
    json.dumps([get_group_size(), {name: os.environ.get(name) for name in names}])
)
