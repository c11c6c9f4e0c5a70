"""The key `trainjob` of a policy."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
ReportSeconds = Annotated[float, msgspec.Meta(ge=1, le=3600)]


class TrainJobPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress that the controller reports to Kubeflow's trainer, where the job runs in a TrainJob.

    Then ranks do not see what the trainer has set for it, so that a script does not report as well. `total_steps`:
    None is what the script reports by that name; without it no share and no time that is left are told.
    """

    report: bool = False
    total_steps: Count | None = None
    every_s: ReportSeconds = 30.0
