"""What an AscendJob (acjob) can say about recovery, each value with the line that it stands on."""

import msgspec

from ...protocol.enums import StrEnum
from ...protocol.types import Rung

API_VERSION = "mindxdl.gitee.com/v1"
KIND = "AscendJob"
MIN_WAIT_S, MAX_WAIT_S = 30, 270  # of wait-reschedule-timeout
MIN_ACTION_S, MAX_ACTION_S = 30, 1800  # of TTP_NORMAL_ACTION_TIME_LIMIT
RECOVER_POLICY_PATH = "huawei.com/recover_policy_path"
ACTION_TIME_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
INT32_MOST = 2**31 - 1
PODS_RESTARTED = (Rung.RECOVER, Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB)  # rungs for which MindCluster restarts pods
WAITS_FOR_PROCESSES = frozenset({"graceExit", "hotSwitch"})  # of subHealthyStrategy: those that do not kill at once


class Strategy(StrEnum):
    """The words of `recover-strategy`, in MindCluster's order, the first tried first."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    ELASTIC_TRAINING = "elastic-training"
    DUMP = "dump"
    EXIT = "exit"


class AcjobValue(msgspec.Struct, frozen=True):
    """One value of the document: its key's path, the line it stands on, and itself."""

    path: str
    line: int
    value: str

    @property
    def number(self) -> int:
        """The value of a setting that was checked to be a whole number."""
        return int(self.value)

    def __str__(self) -> str:
        """Return it as a comment names it."""
        return f"line {self.line}, {self.path}: {self.value}"


class AscendJob(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one document; None where it does not say.

    `others` are keys of MindCluster's recovery that steer nothing in midstep, `typos` keys that are nearly
    MindCluster's. `nodes` are the pods that ask for NPUs, `ranks_per_node` what each asks for; 0: not said.
    """

    name: str
    line: int
    fault_scheduling: AcjobValue | None = None
    fault_retry_times: AcjobValue | None = None
    pod_rescheduling: AcjobValue | None = None
    process_recover: AcjobValue | None = None
    sub_healthy: AcjobValue | None = None
    recover_strategy: AcjobValue | None = None
    strategies: frozenset[Strategy] = frozenset()
    wait_reschedule: AcjobValue | None = None
    backoff_limit: AcjobValue | None = None
    recover_policy_path: AcjobValue | None = None
    grace_period: AcjobValue | None = None
    action_limit: AcjobValue | None = None
    others: tuple[AcjobValue, ...] = ()
    typos: tuple[str, ...] = ()
    nodes: int = 0
    ranks_per_node: int = 0

    @property
    def retries(self) -> AcjobValue | None:
        """The setting that limits restarts of the world: the lower of the two, as in MindCluster; None: no limit."""
        limits = [each for each in (self.fault_retry_times, self.backoff_limit) if each is not None and each.number > 0]
        return min(limits, key=lambda each: each.number, default=None)

    @property
    def left_alone(self) -> bool:
        """Whether MindCluster would reschedule nothing of this job."""
        return self.fault_scheduling is None or self.fault_scheduling.value == "off"

    @property
    def paused(self) -> bool:
        """Whether process-level recovery is set up, and switched off for now."""
        return self.process_recover is not None and self.process_recover.value != "on"

    @property
    def elastic(self) -> bool:
        """Whether it may continue with fewer nodes."""
        return not self.left_alone and not self.paused and Strategy.ELASTIC_TRAINING in self.strategies

    @property
    def stop_grace(self) -> AcjobValue | None:
        """How long a stopped process may take, where that has a meaning."""
        graceful = self.fault_scheduling is not None and self.fault_scheduling.value == "grace"
        return self.grace_period if graceful else None
