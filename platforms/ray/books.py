"""What the platform of a job on Ray has to remember when its process is started again, on whatever machine.

Ray's control store knows the actors. What it does not know lies beside the job's journal.
"""

import time
from pathlib import Path

import msgspec

from ...protocol.errors import ConfigurationError
from ...protocol.private_files import replace_file

_NAME = "ray.json"


class Books(msgspec.Struct, frozen=True):
    """`session`: of the last platform. `nodes`: those that were asked for and are not lost, `placed`: that have begun.

    `bundles`: the reserved places that nodes were given. `given_back`: machines that the job has left. `founded`: the
    first nodes have been asked for.
    """

    session: int = 0
    nodes: tuple[str, ...] = ()
    placed: tuple[str, ...] = ()
    bundles: dict[str, int] = {}
    given_back: tuple[str, ...] = ()
    founded: bool = False


class BookKeeper:
    """Keeps the books of one job. Each change is durable when it returns. Raises ConfigurationError."""

    def __init__(self, job_directory: Path) -> None:
        self._path = job_directory / _NAME
        try:
            self.books = msgspec.json.decode(self._path.read_bytes(), type=Books)
        except FileNotFoundError:
            self.books = Books()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigurationError(f"{self._path} cannot be read: {error}") from error

    def next_session(self) -> int:
        """Return a number above that of every platform of the job before, whatever this machine's clock says."""
        session = max(time.time_ns(), self.books.session + 1)
        self._write(msgspec.structs.replace(self.books, session=session))
        return session

    def found(self, nodes: tuple[str, ...]) -> None:
        """The first nodes have been asked for."""
        self._write(msgspec.structs.replace(self.books, nodes=nodes, founded=True))

    def add(self, node: str) -> None:
        """A node has been asked for."""
        if node not in self.books.nodes:
            self._write(msgspec.structs.replace(self.books, nodes=(*self.books.nodes, node)))

    def bind(self, node: str, bundle: int) -> None:
        """A node was given a reserved place, whether it has a machine yet or not."""
        self._write(msgspec.structs.replace(self.books, bundles={**self.books.bundles, node: bundle}))

    def place(self, node: str) -> None:
        """A node's agent has been started: if the node is not there any more, it is lost."""
        if node not in self.books.placed:
            self._write(msgspec.structs.replace(self.books, placed=(*self.books.placed, node)))

    def remove(self, node: str) -> None:
        """A node is gone."""
        if node in self.books.nodes:
            nodes, placed = (
                tuple(each for each in names if each != node) for names in (self.books.nodes, self.books.placed)
            )
            bundles = {name: bundle for name, bundle in self.books.bundles.items() if name != node}
            self._write(msgspec.structs.replace(self.books, nodes=nodes, placed=placed, bundles=bundles))

    def give_back(self, machine: str) -> None:
        """The job has left a machine."""
        if machine not in self.books.given_back:
            self._write(msgspec.structs.replace(self.books, given_back=(*self.books.given_back, machine)))

    def _write(self, books: Books) -> None:
        try:
            replace_file(self._path, msgspec.json.encode(books))
        except OSError as error:
            raise ConfigurationError(f"{self._path} cannot be written: {error}") from error
        self.books = books
