"""`npu-smi`: what is read of its output, and what is reported of a machine whose driver it asks.

The texts are printed as the program's source prints them, and as its manuals show them. A script plays the program.
"""

import asyncio
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from midstep.detectors import npu_smi
from midstep.detectors.npu_smi import Health, ListedChip, NpuSmiDetector, parse_chips, parse_health, readings_of
from midstep.policies.code_files import default_codes
from midstep.policies.fault_codes import FaultCodes
from midstep.protocol.errors import ConfigurationError, DocumentError
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

PATIENCE_S = 20.0


def table(*rows: str) -> str:
    """Print columns as wide as the program does, with a tab before each row."""
    return "".join("\t" + " ".join(f"{cell:<30}" for cell in row.split("|")) + "\n" for row in rows)


OLDER = table("NPU ID|Chip ID|Chip Logic ID|Chip Name", "0|0|0|Ascend 910B2", "0|1|-|Mcu", "5|0|1|Ascend 910B2")
TWO_IN_ONE = table(
    "NPU ID|Chip ID|Chip Logic ID|Chip Phy-ID|Chip Name",
    "3|0|0|6|Ascend910",
    "3|1|1|7|Ascend910",
    "3|2|-|-|Mcu",
)
NEWEST = table("NPU ID|Slot ID|Chip ID|Chip Phy-ID|Chip Name", "2|1|0|2|Ascend950DT")

WELL = (
    "\tHealth Status                  : OK\n"
    "\tError Code                     : NA\n"
    "\tError Information              : NA\n"
)
ONE = (
    "\tHealth Status                  : Alarm\n"
    "\tError Code                     : 80E01801\n"
    "\tError Information              : node type=HBM, sensor type=ECC, event state=multi bit error\n"
)
TWO = (
    "\tHealth Status                  : Critical\n"
    "\tError Code                     : 80E01801 40F84E00\n"
    "\tError Information              : an uncorrectable error\n"
    "\n\t                               : the device has gone\n"
)
WITHOUT_CODE = WELL.replace("OK", "Critical")
WITHOUT_TEXT = (
    "\tHealth Status                  : Warning\n"
    "\tError Code                     : 80CB8009\n"
    "\tError Information              :Failed to get error information for error code : 0x80cb8009\n"
)
OF_A_CHIP = "\tNPU ID                         : 0\n\tHealth                         : Warning\n"


@pytest.mark.parametrize(
    ("text", "chips"),
    [
        (OLDER, [(0, "-i 0 -c 0"), (1, "-i 5 -c 0")]),
        (TWO_IN_ONE, [(6, "-i 3 -c 0"), (7, "-i 3 -c 1")]),
        (NEWEST, [(2, "-i 2")]),
    ],
)
def test_the_chips_of_a_machine_are_known_by_their_numbers_there(text: str, chips: list[tuple[int, str]]) -> None:
    """Controllers of cards are no chips; a physical number goes before a logical one."""
    assert [(each.device, " ".join(each.selected_by)) for each in parse_chips(text)] == chips


@pytest.mark.parametrize("text", ["", "There is no NPU card on this server.\n", OLDER.splitlines()[0]])
def test_a_machine_without_chips_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match="lists 0 NPUs"):
        parse_chips(text)


@pytest.mark.parametrize(
    ("text", "health"),
    [
        (WELL, Health("OK")),
        (ONE, Health("Alarm", (("80E01801", "node type=HBM, sensor type=ECC, event state=multi bit error"),))),
        (TWO, Health("Critical", (("80E01801", "an uncorrectable error"), ("40F84E00", "the device has gone")))),
        (WITHOUT_CODE, Health("Critical")),
        (WITHOUT_TEXT, Health("Warning", (("80CB8009", ""),))),
        (OF_A_CHIP, Health("Warning")),
    ],
)
def test_the_state_of_a_chip_and_all_its_codes_are_read(text: str, health: Health) -> None:
    assert parse_health(text) == health


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is not in what npu-smi has printed: nothing"),
        ("dcmi module initialize failed. ret is -8005\n", "dcmi module initialize failed"),
        (ONE.replace("80E01801", "80E01801 ?"), r"found \?; known: up to 128 codes"),
        (ONE.replace("80E01801", "80E01801 " * 129), "known: up to 128 codes"),
    ],
)
def test_what_is_no_state_of_a_chip_is_refused(text: str, what: str) -> None:
    """It must not seem well because its faults cannot be read."""
    with pytest.raises(DocumentError, match=what):
        parse_health(text)


def test_a_state_is_a_fault_only_where_no_code_says_more() -> None:
    chip = ListedChip(6, ("-i", "3"))
    assert [each.code for each in readings_of("node1", chip, parse_health(TWO))] == ["80E01801", "40F84E00"]
    (reading,) = readings_of("node1", chip, parse_health(WITHOUT_CODE))
    assert (reading.code, reading.node, reading.device) == ("NPU-CRITICAL", "node1", 6)
    assert readings_of("node1", chip, Health("OK")) == readings_of("node1", chip, Health("UNKNOWN")) == ()


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (TWO, [FaultLevel.RESTART_BUSINESS, FaultLevel.RESTART_NPU]),
        (WITHOUT_CODE, [FaultLevel.SEPARATE_NPU]),
        (WELL.replace("OK", "Alarm"), [FaultLevel.PRE_SEPARATE_NPU]),
        (WELL.replace("OK", "Warning"), [FaultLevel.NOT_HANDLE]),
    ],
)
def test_codes_and_states_have_the_levels_of_the_table(text: str, levels: list[FaultLevel]) -> None:
    codes = FaultCodes(default_codes())
    readings = readings_of("node1", ListedChip(0, ()), parse_health(text))
    assert [codes.completed(each.report("detector/npu-smi", 1.0)).level for each in readings] == levels


# --- a machine whose driver is asked ----------------------------------------------------------------------------------


class Machine:
    """A machine with two chips, and a program that prints what is written in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "npu-smi"
        (folder / "map").write_text(TWO_IN_ONE)
        self.is_now(0, WELL)
        self.is_now(1, WELL)
        self.program.write_text(
            "#!/bin/sh\n"
            f"cd {folder}\n"
            'if [ "$2" = -m ]; then cat map; exit 0; fi\n'
            '[ -e "hangs.$7" ] && { echo $$ >> asked; exec sleep 600; }\n'
            '[ -e "fails.$7" ] && { echo "Error parameter of -c"; exit 3; }\n'
            'cat "health.$7"\n'
        )
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)

    def is_now(self, chip: int, text: str) -> None:
        """Have the driver say this of a chip from now on."""
        (self.folder / "next").write_text(text)
        (self.folder / "next").replace(self.folder / f"health.{chip}")

    def reports(self, *happenings: tuple[Callable[[], object], int]) -> list[FaultReport]:
        """Run a detector; after each happening wait for so many further reports. Return all of them."""
        told: list[FaultReport] = []

        async def scenario() -> None:
            detector = NpuSmiDetector("npu-smi", "node1", self.folder / "state", str(self.program))
            watching = asyncio.create_task(detector.watch(told.append, every_s=0.02))
            for happen, number in happenings:
                before = len(told)
                happen()
                give_up_s = time.monotonic() + PATIENCE_S
                while len(told) < before + number and not watching.done():
                    assert time.monotonic() < give_up_s, told
                    await asyncio.sleep(0.01)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

        asyncio.run(scenario())
        return told


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_fault_of_a_chip_is_reported_when_it_comes_and_when_it_goes(machine: Machine) -> None:
    """So is a further one beside it; one that stands is reported once."""
    told = machine.reports(
        (lambda: machine.is_now(1, ONE), 1), (lambda: machine.is_now(1, TWO), 1), (lambda: machine.is_now(1, WELL), 2)
    )
    assert [(each.code, each.assertion) for each in told] == [
        ("80E01801", Assertion.OCCUR),
        ("40F84E00", Assertion.OCCUR),
        ("80E01801", Assertion.RECOVER),
        ("40F84E00", Assertion.RECOVER),
    ]
    assert {(each.node, each.device, each.kind) for each in told} == {("node1", 7, FaultKind.DEVICE)}


def test_a_fault_that_has_gone_while_no_detector_ran_is_ended_by_the_next_one(machine: Machine) -> None:
    (fault,) = machine.reports((lambda: machine.is_now(1, ONE), 1))
    machine.is_now(1, WELL)
    (recovered,) = machine.reports((lambda: None, 1))
    assert (recovered.fault_id, recovered.assertion) == (fault.fault_id, Assertion.RECOVER)


def test_a_chip_whose_health_cannot_be_read_keeps_its_faults_and_the_detector_says_so(machine: Machine) -> None:
    def fail() -> None:
        (machine.folder / "fails.1").touch()

    def work_again() -> None:
        machine.is_now(1, WELL)
        (machine.folder / "fails.1").unlink()

    fault, failed, works, recovered = machine.reports((lambda: machine.is_now(1, ONE), 1), (fail, 1), (work_again, 2))
    assert (fault.code, failed.kind, failed.level) == ("80E01801", FaultKind.DETECTOR, FaultLevel.NOT_HANDLE)
    assert "ended with status 3: Error parameter of -c; the faults that it had stay in force" in failed.detail
    assert (works.kind, works.assertion) == (FaultKind.DETECTOR, Assertion.RECOVER)
    assert (recovered.code, recovered.assertion) == ("80E01801", Assertion.RECOVER)


def test_a_driver_that_does_not_answer_for_one_chip_is_not_asked_again_and_holds_up_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that wait in the driver cannot be killed, and must not add up."""
    monkeypatch.setattr(npu_smi, "ANSWER_S", 0.3)
    (machine.folder / "hangs.1").touch()
    silent, fault, again = machine.reports(
        (lambda: None, 1),
        (lambda: machine.is_now(0, ONE), 1),
        (lambda: machine.is_now(0, TWO), 1),
    )
    assert "no answer in 0.3 s" in silent.detail
    assert silent.kind is FaultKind.DETECTOR
    assert [(each.device, each.code) for each in (fault, again)] == [(6, "80E01801"), (6, "40F84E00")]
    (asked,) = (machine.folder / "asked").read_text().split()
    with pytest.raises(ProcessLookupError):  # it ended with the detector
        os.kill(int(asked), signal.SIG_DFL)


@pytest.mark.parametrize(
    ("program", "words"),
    [("sleep 600", "cannot be listed: no answer in 0.3 s"), ("yes", "prints more than 4096 bytes")],
)
def test_a_program_that_says_nothing_or_too_much_is_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    monkeypatch.setattr(npu_smi, "LIST_S", 0.3 if "sleep" in program else PATIENCE_S)
    monkeypatch.setattr(npu_smi, "MAX_OUTPUT_BYTES", 4096)
    machine.program.write_text(f"#!/bin/sh\nexec {program}\n")
    watching = NpuSmiDetector("npu-smi", "node1", program=str(machine.program)).watch(lambda report: None)
    with pytest.raises(ConfigurationError, match=words):
        asyncio.run(watching)


def test_a_machine_without_the_program_or_without_npus_is_refused_with_what_to_do(machine: Machine) -> None:
    async def watch(program: str) -> None:
        await NpuSmiDetector("npu-smi", "node1", program=program).watch(lambda report: None)

    with pytest.raises(ConfigurationError, match=r"cannot be listed: .*No such file.* Run this on the host"):
        asyncio.run(watch(str(machine.folder / "missing")))
    (machine.folder / "map").write_text("There is no NPU card on this server.\n")
    with pytest.raises(ConfigurationError, match=r"lists 0 NPUs; known: 1 to 64\. Run this on the host"):
        asyncio.run(watch(str(machine.program)))
