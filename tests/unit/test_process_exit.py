"""A process that has run a program ends with the program's status, whatever its exit hooks do."""

import subprocess
import sys

import pytest

LIMIT_S = 20.0
SHORT = """
import atexit, ctypes, os, sys, threading, time
from midstep.agent import process_exit
process_exit.THREADS_S, process_exit.EXIT_HOOKS_S, process_exit.HELD_S, process_exit.SHOWN_S = 0.2, 0.5, 1.0, 0.5
"""
HOLDS = "ctypes.PyDLL(None).sleep(600)"  # without giving the GIL away


def ended(program: str) -> tuple[int, str]:
    """Return the exit status and what was written to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT + program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("status", [0, 7])
def test_an_exit_hook_that_keeps_the_interpreter_ends_in_time_with_the_status_of_the_program(status: int) -> None:
    """A rank that has finished is not taken for one that was lost. The log has the line at which it hung."""
    code, said = ended(f"def sign_off():\n    {HOLDS}\natexit.register(sign_off)\nprocess_exit.end_process({status})")
    assert code == status
    assert "in sign_off" in said


def test_a_thread_that_keeps_the_interpreter_ends_in_time_too() -> None:
    hold = f"def hold():\n    begun.wait()\n    {HOLDS}\nbegun = threading.Event()"
    start = "threading.Thread(target=hold).start()"
    hook = "atexit.register(time.sleep, 600)\natexit.register(begun.set)"
    code, _ = ended(f"{hold}\n{start}\n{hook}\nprocess_exit.end_process(0)")
    assert code == 0


def test_an_exit_hook_that_only_takes_long_is_left_out_with_a_word() -> None:
    code, said = ended("atexit.register(time.sleep, 600)\nprocess_exit.end_process(3)")
    assert code == 3
    assert "exit hooks took longer than 0.5 s" in said
    assert "Timeout" not in said


def test_exit_hooks_that_end_are_run_and_nothing_is_said() -> None:
    code, said = ended("atexit.register(print, 'leaving', file=sys.stderr)\nprocess_exit.end_process(0)")
    assert (code, said) == (0, "leaving\n")
