"""Controls as lines of text, those that stand and those that were given; and the rules of the policy."""

from collections.abc import Iterator

from rich.text import Text

from ...protocol.controls import ControlRecord, words_of
from ...protocol.incidents import JobStatus
from ...protocol.types import OPERATOR
from ...protocol.wording import ranks_text
from .wording import cell, clock_text, count_text, duration_text, telling_line


def standing_lines(status: JobStatus) -> list[Text]:
    """Return a line for each thing that an operator wants of the job now."""
    return [Text(line, style="bold yellow") for line in standing(status)]


def standing(status: JobStatus) -> Iterator[str]:
    """Yield in words what operators want of the job now, the most telling thing first."""
    controls, now = status.controls, status.at_s
    if controls.pause is not None:
        left = duration_text(max(0.0, controls.pause.until_s - now))
        how = "all ranks stand still" if status.held else "the ranks stop at the next step boundary"
        yield f"paused, {how}, for {left} more: {telling_line(controls.pause.asked.text)}"
    action = controls.action
    if action is not None and action.waiting:
        left = duration_text(max(0.0, action.until_s - now))
        ranks = ranks_text(action.waiting)
        yield f"{cell(action.control.action)} is performed: {ranks} may take {left} more"
    for wish in controls.wishes:
        yield f"at the next step boundary: {words_of(wish.control)}: {telling_line(wish.asked.text)}"
    for order in controls.rungs:
        if now < order.until_s:
            left = duration_text(order.until_s - now)
            yield f"{order.rung} is not taken for {left} more: {telling_line(order.reason)}"
    for fault in status.faults:
        if fault.report.seen_by == OPERATOR:
            what = telling_line(fault.report.fault_id or "left")
            yield f"{what}, since {clock_text(fault.since_s)} until it is released: {telling_line(fault.report.detail)}"
    seen = controls.acknowledged
    if seen is not None:
        yield f"acknowledged at {clock_text(seen.at_s)}: {telling_line(seen.asked.text)}"


def rule_lines(status: JobStatus) -> list[Text]:
    """Return a line for each rule of the policy that was broken, with a heading; nothing where none was."""
    tallies, steps = status.rules.tallies, status.rules.steps_left_out
    if not tallies:
        return []
    left_out = f" (the batches of {count_text(steps, 'step')} were left out)" if steps else ""
    lines = [
        f"  {cell(name)}: {tally.then}, {count_text(tally.times, 'time')}, last at step {tally.step}, "
        f"{clock_text(tally.at_s)}{': ' if tally.detail else ''}{telling_line(tally.detail)}"
        for name, tally in tallies.items()
    ]
    return [Text(f"rules that were broken{left_out}", style="dim"), *map(Text, lines)]


def record_lines(status: JobStatus, most: int) -> list[Text]:
    """Return a line for each of the latest controls, with a heading; nothing where there are none."""
    records = status.controls.records[-most:]
    if not records:
        return []
    left_out = status.controls.counted - len(records)
    earlier = f" ({left_out} earlier ones are in the story)" if left_out else ""
    return [Text(f"what operators did{earlier}", style="dim"), *(Text(f"  {record_text(each)}") for each in records)]


def record_text(record: ControlRecord) -> str:
    """Say who asked for what, when and why, and what has become of it."""
    who = f"{cell(record.asked.by)} ({cell(record.asked.role)})"
    said = f"{clock_text(record.at_s)}  {who}: {telling_line(record.what)}, because {telling_line(record.asked.why)}"
    return f"{said}; {telling_line(record.outcome)}"
