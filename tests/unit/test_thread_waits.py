"""A thread's system call says what it waits for: nothing at all, whatever comes, or an answer."""

import pytest

from midstep.agent.thread_waits import Wait, wait_of

X86, ARM = "x86_64", "aarch64"
REST = "0x0 0x0 0x0 0x7ffc29089f28 0x7fa3af0d82ad"


@pytest.mark.parametrize(
    ("text", "machine", "found"),
    [
        ("running", X86, Wait.CORE),
        ("-1 0x7ffc29089f28 0x7fa3af0d82ad", X86, Wait.ONE),  # in no call: it waits for memory
        ("", X86, Wait.ONE),  # it has ended
        (f"202 0x55 0x189 0x0 {REST}", X86, Wait.LOCK),
        (f"98 0x55 0x189 0x0 {REST}", ARM, Wait.LOCK),
        (f"230 0x1 0x1 0x7f {REST}", X86, Wait.CLOCK),
        (f"115 0x1 0x1 0x7f {REST}", ARM, Wait.CLOCK),
        (f"0 0x3 0x7f 0x2000 {REST}", X86, Wait.ONE),  # read
        (f"45 0x3 0x7f 0x2000 {REST}", X86, Wait.ONE),  # recvfrom
        (f"61 0xffffffff 0x0 0x0 {REST}", X86, Wait.ONE),  # wait4
        (f"232 0xa 0x7f 0x100 {REST}", X86, Wait.ANY),  # epoll_wait
        (f"22 0xa 0x7f 0x100 {REST}", ARM, Wait.ANY),
        (f"288 0x3 0x0 0x0 {REST}", X86, Wait.ANY),  # accept4
        (f"7 0x7f 0x2 0x1388 {REST}", X86, Wait.ANY),  # poll of two, for 5 s
        (f"7 0x7f 0x1 0x1388 {REST}", X86, Wait.ONE),  # of one, with a limit
        (f"7 0x7f 0x1 0xffffffff {REST}", X86, Wait.ANY),  # of one, for ever
        (f"7 0x7f 0x1 0xffffffffffffffff {REST}", X86, Wait.ANY),
        (f"271 0x7f 0x1 0x0 {REST}", X86, Wait.ANY),  # ppoll, for ever
        (f"73 0x7f 0x1 0x7f {REST}", ARM, Wait.ONE),
        (f"73 0x7f 0x1 0x0 {REST}", ARM, Wait.ANY),
        (f"270 0x0 0x0 0x0 {REST}", X86, Wait.CLOCK),  # pselect6 of nothing: how older Pythons sleep
        (f"23 0x5 0x7f 0x0 {REST}", X86, Wait.ANY),
        (f"72 0x0 0x0 0x0 {REST}", ARM, Wait.CLOCK),
        (f"202 0x3 0x0 0x0 {REST}", ARM, Wait.ANY),  # accept: the numbers of machines differ
        (f"202 0x55 0x189 0x0 {REST}", "riscv64", Wait.ONE),  # its calls are not known here
    ],
)
def test_a_system_call_says_what_is_waited_for(text: str, machine: str, found: Wait) -> None:
    assert wait_of(text, machine) is found
