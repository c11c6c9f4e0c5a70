"""MindIO's enumerations and return codes, with its values: scripts compare numbers, and pass them on."""

import enum

RET_OK = 0
RET_ERROR = 1
RET_NO_REBUILD = 2  # of the clean handler: the damaged memory is no tensor's
EXIT_STATUS = 2  # of a process that is to be replaced


class ReportState(enum.Enum):
    """How a training process stands: the argument of `tft_report_error`."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(enum.Enum):
    """A rank's part in a repair, in `repair_info["repair_type"]`."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class NextAction(enum.Enum):
    """What the training thread does next."""

    RETRY = 0
    EXIT = 1


class OptimizerType(enum.Enum):
    """Which optimizer a replica is of: the place in the list that `tft_set_optimizer_replica` takes."""

    ATTENTION = 0
    MOE = 1


class RepairStrategy(str, enum.Enum):
    """What `tft_get_repair_type` answers."""

    RETRY = "retry"
    RECOVER = "recover"
    DUMP = "dump"
    NONE = "unknow"
