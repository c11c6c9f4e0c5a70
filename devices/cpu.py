"""The CPU as a device: nothing runs on it behind the train thread's back, so there is nothing to stop or clean."""


class CpuDevice:
    """A Device whose operators end when their calls return."""

    name = "cpu"

    def stop(self) -> None:
        """Do nothing: an operator on the CPU ends by itself, and collectives are the communicator's to abort."""

    def clean(self) -> None:
        """Do nothing: operators on the CPU hold no resources beyond their tensors."""

    def rebuilt(self) -> None:
        """Do nothing: the CPU knows no communicators."""
