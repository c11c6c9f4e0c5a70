"""Faults of NPUs as `npu-smi` shows them: for machines on which MindCluster's device plugin does not run.

The program comes with the driver. `npu-smi info -m` lists the chips of a machine, `npu-smi info -t health` says of one
of them how it is, and the codes of everything that is wrong with it. These are the codes of the device plugin, so they
have the same levels (docs/faults.md). Both are parsed as the program's source prints them (the driver's repository of
CANN); the older tables have no physical number of a chip, and on the host the logical one is the same.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..protocol.compat import within
from ..protocol.errors import ConfigurationError, DocumentError
from ..protocol.own_programs import end
from ..protocol.types import FaultKind, detector_address
from .documents import Document
from .files import Snapshots
from .reading import MAX_DEVICE, Reading, Report, plain

PROGRAM = "npu-smi"
EVERY_S = 5.0
ANSWER_S = 30.0  # a driver at fault may not answer at all
LIST_S = 60.0
MOST_CHIPS = 64
MOST_CODES = 128  # of one chip, as the driver has it
MAX_OUTPUT_BYTES = 1 << 20
NOTHING = "NA"
NO_CODE = {"WARNING": "NPU-WARNING", "ALARM": "NPU-ALARM", "CRITICAL": "NPU-CRITICAL"}  # what a state alone is called
_COLUMNS = re.compile(r"\s{2,}")
_CODE = re.compile(r"[0-9A-F]{4,8}")
_NPU, _CHIP, _SLOT, _LOGICAL, _PHYSICAL = "NPU ID", "Chip ID", "Slot ID", "Chip Logic ID", "Chip Phy-ID"
_STAY = "the faults that it had stay in force"
_STATES, _CODES, _TEXTS = ("Health Status", "Health"), "Error Code", "Error Information"


class ListedChip(msgspec.Struct, frozen=True):
    """One NPU. `device`: its number on the machine; `selected_by`: the arguments by which the program knows it."""

    device: int
    selected_by: tuple[str, ...]


class Health(msgspec.Struct, frozen=True):
    """The state of a chip, and the codes of what is wrong with it, each with its text."""

    state: str
    faults: tuple[tuple[str, str], ...] = ()


def parse_chips(text: str) -> tuple[ListedChip, ...]:
    """Return the chips in the output of `npu-smi info -m`. Raises DocumentError when there is none."""
    chips = tuple(_chips(text))
    if not 0 < len(chips) <= MOST_CHIPS:
        raise DocumentError("", f"`{PROGRAM} info -m` lists {len(chips)} NPUs; known: 1 to {MOST_CHIPS}")
    return chips


def _chips(text: str) -> Iterator[ListedChip]:
    columns: list[str] = []
    for line in text.splitlines():
        cells = _COLUMNS.split(line.strip())
        if cells[0] == _NPU:
            columns = cells
            continue
        row = dict(zip(columns, cells, strict=False))
        device = row.get(_PHYSICAL, row.get(_LOGICAL, ""))
        numbers = (device, row.get(_NPU, ""), row.get(_CHIP, ""))
        if not all(each.isascii() and each.isdecimal() for each in numbers):
            continue  # a controller on the card has no number of a chip; other lines have no cells
        if int(device) > MAX_DEVICE:
            raise DocumentError(_PHYSICAL, f"found {device}; known: 0 to {MAX_DEVICE}")
        has_one_chip = _SLOT in columns  # as the newest cards do
        yield ListedChip(int(device), ("-i", row[_NPU], *(() if has_one_chip else ("-c", row[_CHIP]))))


def parse_health(text: str) -> Health:
    """Return how a chip is, from the output of `npu-smi info -t health`. Raises DocumentError with the field."""
    fields: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        key, separator, value = line.partition(" : ")
        if separator or (line.rstrip().endswith(":") and (key := line.rstrip()[:-1])):
            name = key.strip() or name  # a further text has no name of its own
            fields.setdefault(name, []).append(value.strip())
    state = next((fields[each][0] for each in _STATES if each in fields), "")
    if not state:
        raise DocumentError(_STATES[0], f"is not in what {PROGRAM} has printed: {plain(text) or 'nothing'}")
    codes = [each for value in fields.get(_CODES, ()) for each in value.split() if each != NOTHING]
    wrong = [each for each in codes if not _CODE.fullmatch(each)]
    if wrong or len(codes) > MOST_CODES:
        raise DocumentError(
            _CODES, f"found {plain(' '.join(wrong or codes))}; known: up to {MOST_CODES} codes like 80E01801"
        )
    texts = [each for each in fields.get(_TEXTS, ()) if each and each != NOTHING]
    aligned = texts if len(texts) == len(codes) else ["; ".join(texts)] * len(codes)
    return Health(state, tuple(zip(codes, aligned, strict=True)))


def readings_of(node: str, chip: ListedChip, health: Health) -> tuple[Reading, ...]:
    """Return the faults of a chip. A state that is not well is a fault by itself only where no code says more."""
    faults = dict(health.faults)
    if not faults and health.state.upper() in NO_CODE:
        faults = {NO_CODE[health.state.upper()]: f"{PROGRAM} names no code"}
    return tuple(
        Reading(
            kind=FaultKind.DEVICE,
            fault_id=f"{code} {node}/{chip.device}",
            node=node,
            device=chip.device,
            code=code,
            detail=plain(f"{health.state}: {text}" if text else health.state),
        )
        for code, text in faults.items()
    )


class NpuSmiDetector:
    """Asks `npu-smi` for the health of all chips of this machine, again and again."""

    def __init__(self, name: str, node: str, state: Path | None = None, program: str = PROGRAM) -> None:
        """`name`: of the detector. `node`: the job's name of this machine.

        `state`: file in which a restarted detector finds what it has reported, and may have gone meanwhile.
        """
        self._node = node
        self._program = program
        self._snapshots = Snapshots(detector_address(name), state)
        self._asking: dict[ListedChip, asyncio.Task[str]] = {}  # questions that are not answered yet

    async def watch(self, report: Report, every_s: float = EVERY_S) -> None:
        """Report the faults that stand, then every change, until cancelled.

        Raises ConfigurationError when the chips cannot be listed. Later the faults of a chip whose health cannot be
        read stay in force, and a fault of the detector says so.
        """
        try:
            chips = parse_chips(await within(LIST_S, _output(self._program, "info", "-m")))
        except (OSError, TimeoutError, DocumentError) as error:
            why = str(error) or f"no answer in {LIST_S:g} s"
            raise ConfigurationError(
                f"the NPUs of this machine cannot be listed: {why}. Run this on the host, as a user for whom "
                f"`{self._program} info -m` works."
            ) from error
        try:
            while True:
                documents = await asyncio.gather(*map(self._document, chips))
                if news := self._snapshots.take(documents, time.time()):
                    for each in news:
                        report(each)
                    self._snapshots.keep()
                await asyncio.sleep(every_s)
        finally:
            for question in self._asking.values():
                question.cancel()
            await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _document(self, chip: ListedChip) -> Document:
        """Ask how a chip is."""
        name, key = f"{self._program} info -t health {' '.join(chip.selected_by)}", _STATES[0]
        if chip not in self._asking:  # it is not asked once more before it has answered: nothing may end the process
            answer = _output(self._program, "info", "-t", "health", *chip.selected_by)
            self._asking[chip] = asyncio.ensure_future(answer)
        done, _ = await asyncio.wait([self._asking[chip]], timeout=ANSWER_S)
        if not done:
            return Document(name, key, error=f"no answer in {ANSWER_S:g} s; {_STAY}")
        question = self._asking.pop(chip)
        try:
            return Document(name, key, readings_of(self._node, chip, parse_health(question.result())))
        except (OSError, DocumentError) as error:
            return Document(name, key, error=f"{plain(str(error))}; {_STAY}")


async def _output(*words: str) -> str:
    """Return what a program prints. Raises OSError when it cannot be started, DocumentError when it fails."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    printed = bytearray()
    try:
        while len(printed) < MAX_OUTPUT_BYTES and (more := await process.stdout.read(MAX_OUTPUT_BYTES)):
            printed += more
        if len(printed) >= MAX_OUTPUT_BYTES:
            raise DocumentError("", f"`{' '.join(words)}` prints more than {MAX_OUTPUT_BYTES} bytes")
        code = await process.wait()
    finally:
        await end(process)
    text = printed.decode(errors="replace")
    if code:
        raise DocumentError("", f"`{' '.join(words)}` ended with status {code}: {plain(text) or 'it printed nothing'}")
    return text
