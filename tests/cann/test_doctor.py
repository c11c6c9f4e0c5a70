"""`midstep doctor` finds the fake CANN good, and stops device 0 through torch-npu itself."""

import os

from midstep.cli.npu_examination import examine
from midstep.devices.kinds import NPU_DEFAULTS


def test_all_that_is_looked_at_is_good_and_a_device_is_stopped() -> None:
    found = examine({**NPU_DEFAULTS, **os.environ}, stop=True)
    assert [each for each in found.findings if not each.good] == []
    assert found.devices > 0
    assert found.findings[-1].what == "firmware"
