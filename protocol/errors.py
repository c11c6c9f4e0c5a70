"""Every error that midstep raises, in one tree.

::

    MidstepError
    +-- ConfigurationError          the user's file, flag or environment is wrong; nothing was started
    |   +-- PolicyError             a policy YAML: carries file and key
    |   +-- NotUnderMidstep         a call that needs `midstep run` around it
    |   +-- UnsupportedState        a train state that cannot be captured without pickle
    |   +-- UnsupportedCollective   a collective that the job's library does not do, for its arguments
    +-- WireError                   bytes that are refused; counted, never fatal
    |   +-- MalformedMessage
    |   |   +-- ForeignVersion      another release of midstep speaks there
    |   +-- OversizedMessage
    +-- MailboxFull                 more is unacknowledged than a mailbox may hold; nothing was posted
    +-- JournalError                the controller's journal cannot be read or written
    |   +-- JournalDamaged          it is not what was written: no controller may act on it
    |   +-- ElectionLost            another controller was quicker to depose a silent leader
    |   +-- SnapshotUnreadable      a snapshot in it is not one that this version reads; an earlier one may do
    |   +-- JournalSuperseded       a later term has begun: this controller is no longer the active one
    |       +-- SteppedDown         it has handed the lead over, as an admin has asked it to
    +-- PlatformError               nodes could not be had or released
    +-- YamlError                   YAML text is refused; carries line and column
    +-- DocumentError               what a detector left or sent cannot be understood; it is skipped and reported
    +-- AgentError                  a process could not be started or watched
    +-- CommunicatorError           collectives
    |   +-- CommunicatorAborted     aborted on purpose; the recovery continues
    |   +-- LinkUpFailed            communicators could not be built in time
    |   +-- CommunicatorFailed      a peer went away in the middle of a collective
    +-- RecoveryError               the recovery itself cannot continue in this process
    |   +-- ChecksumMismatch
    |   +-- StateLost               no clean copy is left
    |   +-- StateUnreadable         the bytes of a captured state are damaged
    |   +-- ProtocolViolation       the user's loop broke the order of the consistent step
    |   +-- OrdersOverdue           no word from the controller before the deadline
    |   +-- CallbackFailed          a lifecycle callback of the user's raised an exception
    |   +-- HostCopyError           a copy in host memory cannot be made, or is not what was written
    +-- CheckpointError             a checkpoint cannot be written or read
    +-- RoleStoreError              the store that the roles of a job share gives no answer

    Interrupted(BaseException)      raised in the train thread to leave the train function; never caught by users
    InjectedFault(Exception)        raised on purpose by `midstep inject --raise`
"""


class MidstepError(Exception):
    """The root. Its text says what happened, where, and what to do about it."""


class ConfigurationError(MidstepError):
    """The user's file, flag or environment is wrong. Nothing was started."""


class ForeignFile(ConfigurationError):
    """A file that says where to connect could have been written by another user. It is not followed."""


class NotAdmitted(ConfigurationError):
    """The controller does not admit this node: a wrong token, or its own reason. The same again will not help."""


class KeyExpired(MidstepError):
    """A client's key was admitted until a time that has passed."""


class KeyReplaced(MidstepError):
    """A client's key follows from a token that the job had before."""


class PolicyError(ConfigurationError):
    """A policy YAML is wrong. The text names the file, the path of the key and what is allowed there."""


class NotUnderMidstep(ConfigurationError):
    """A call that needs `midstep run` around it was made in a process that was started otherwise."""


class UnsupportedState(ConfigurationError):
    """The train state holds a value that cannot be captured without pickle. The text names its path."""


class UnsupportedCollective(ConfigurationError):
    """The job's collective library does not do this operation, or not for this dtype. No link has failed."""


class WireError(MidstepError):
    """Bytes that are refused. They are counted and dropped; the connection stays open."""


class MalformedMessage(WireError):
    """Bytes that are no message of this protocol."""


class ForeignVersion(MalformedMessage):
    """A message of another version of the protocol: another release of midstep speaks there."""


class OversizedMessage(WireError):
    """A message beyond the size limit."""


class MailboxFull(MidstepError):
    """More is unacknowledged than a mailbox may hold. Nothing was posted."""


class JournalError(MidstepError):
    """The controller's journal cannot be read or written."""


class StoreUnreachable(JournalError):
    """The store of the journal or of the election does not answer, or fails. Asked again it may do as asked."""


class JournalDamaged(JournalError):
    """The journal is not what was written: records are missing, changed or foreign. No controller may act on it."""


class SnapshotUnreadable(JournalError):
    """A snapshot in the journal cannot be read by this version. An earlier one, or the events, may do."""


class ElectionLost(JournalError):
    """Another controller was quicker to depose a silent leader: stand by again."""


class JournalSuperseded(JournalError):
    """A later term has begun: this controller is no longer the active one and has to end."""


class SteppedDown(JournalSuperseded):
    """This controller hands the lead over to one that was promoted, and stands by."""


class PlatformError(MidstepError):
    """The platform could not create or release nodes."""


class YamlError(MidstepError):
    """YAML text is refused. The text says where: line and column count from 1, and are 0 where they are not known."""

    def __init__(self, problem: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line}, column {column}: {problem}" if line else problem)


class DocumentError(MidstepError):
    """A document of a detector cannot be understood. `key`: where in it."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key}: {what}" if key else what)
        self.key = key


class AgentError(MidstepError):
    """A process could not be started or watched."""


class CommunicatorError(MidstepError):
    """A collective or its connections failed. The base class of the errors below."""


class CommunicatorAborted(CommunicatorError):
    """The communicators were aborted on purpose; the recovery continues."""


class CommunicatorFailed(CommunicatorError):
    """A peer went away, or a link broke, in the middle of a collective."""


class LinkUpFailed(CommunicatorError):
    """Communicators could not be built in time."""


class RecoveryError(MidstepError):
    """The recovery cannot continue in this process; that is reported, and the controller decides."""


class ChecksumMismatch(RecoveryError):
    """Bytes that arrived are not the bytes that were sent."""


class StateLost(RecoveryError):
    """No clean copy of something is left."""


class StateUnreadable(RecoveryError):
    """The bytes of a captured state cannot be decoded: they are damaged, or were never such a state."""


class ProtocolViolation(RecoveryError):
    """The train loop broke the order of the consistent step (see `docs/training-loop.md`)."""


class OrdersOverdue(RecoveryError):
    """The controller gave no orders before the deadline."""


class CallbackFailed(RecoveryError):
    """A lifecycle callback of the user's raised an exception, which is the cause of this one."""


class HostCopyError(RecoveryError):
    """A copy in host memory cannot be made for lack of memory, or is not what was written."""


class CheckpointError(MidstepError):
    """A checkpoint cannot be written or read."""


class RoleStoreError(MidstepError):
    """The store that the roles of a job share was not reached, has nothing under a key, or is full."""


class Interrupted(BaseException):
    """Raised in the train thread to leave the train function, past a script's own `except Exception`."""


class InjectedFault(Exception):
    """Raised on purpose by `midstep inject`."""
