"""The rows as Markdown, for the terminal and for docs/benchmarks.md."""

from collections.abc import Mapping, Sequence

from .kinds import Fault
from .plan import Peer
from .summary import OURS, PLAIN, Bits, Row, StepRow, best_of_others, excess

WORDS = {
    Fault.KILL: "killed (SIGKILL)",
    Fault.EXCEPTION: "raises an exception",
    Fault.STOP: "stopped (SIGSTOP)",
    Fault.SLEEP: "sleeps for ever",
}
HEAD = (
    "excess over a step, s", "wall lost, s", "steps repeated", "processes restarted", "ranks afterwards", "bits",
)  # fmt: skip
BITS = {Bits.EQUAL: "equal", Bits.OTHER: "**not equal**", Bits.UNKNOWN: "?"}


def faults(rows: Sequence[Row], peers: Mapping[str, Peer]) -> str:
    """Return a table for each fault and size, the quickest first; the least excess is bold, whichever tool has it."""
    parts = []
    for fault, words in WORDS.items():
        for ranks in sorted({row.trial.ranks for row in rows if row.trial.fault is fault}):
            of_kind = [row for row in rows if (row.trial.fault, row.trial.ranks) == (fault, ranks)]
            parts.append(_table(sorted(of_kind, key=excess), peers, f"One of {ranks} ranks {words}"))
    return "\n\n".join(parts)


def _table(rows: Sequence[Row], peers: Mapping[str, Peer], title: str) -> str:
    lines = [f"| {title} | " + " | ".join(HEAD) + " |", "| --- |" + " --- |" * len(HEAD)]
    for row in rows:
        name = f"{peers[row.trial.peer].title}, {row.trial.setting.value}"
        if row.excess_s is None:
            lines.append(f"| {name} | {_failed(row)} |" + " |" * (len(HEAD) - 1))
            continue
        shown = f"**{row.excess_s.median:.2f}** ({row.excess_s.least:.2f}-{row.excess_s.greatest:.2f})"
        cells = [
            shown if row is rows[0] else str(row.excess_s),
            str(row.wall_lost_s),
            str(row.steps_repeated),
            str(row.processes_restarted),
            str(row.world) if row.world == row.trial.ranks else f"**{row.world}**",
            BITS[row.bits],
        ]
        if row.recovered < row.attempts:
            cells[0] += f"; {row.attempts - row.recovered} of {row.attempts} failed: {row.why}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _failed(row: Row) -> str:
    return f"{row.attempts} of {row.attempts} failed: {row.why}" if row.attempts else row.why


def ratios(rows: Sequence[Row], peers: Mapping[str, Peer]) -> str:
    """Return midstep's excess beside that of the best tool after which the world is whole, as it comes and tuned."""
    head = "| ranks, fault | midstep: excess, s | the best other that restores all ranks | ratio |"
    lines = [head, "| --- | --- | --- | --- |"]
    for ours in sorted(
        rows, key=lambda row: (row.trial.ranks, list(Fault).index(row.trial.fault), row.trial.setting.value)
    ):
        best = best_of_others(rows, ours.trial.fault, ours.trial.ranks)
        if ours.trial.tool == OURS and ours.excess_s is not None and best is not None and best.excess_s is not None:
            lines.append(
                f"| {ours.trial.ranks}, {ours.trial.fault.value} | {ours.trial.setting.value} {ours.excess_s} | "
                f"{peers[best.trial.peer].title}, {best.trial.setting.value} {best.excess_s} | "
                f"{ours.excess_s.median / best.excess_s.median:.2f} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def steps(rows: Sequence[StepRow], peers: Mapping[str, Peer]) -> str:
    """Return what a step costs beside a plain run, the cheapest first."""
    plain = next((peer.title for name, peer in peers.items() if name.endswith(PLAIN)), PLAIN)
    lines = [f"| ranks | | step, ms | to {plain} |", "| --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: (row.trial.ranks, row.ratio.median)):
        times = (1000 * row.step_s.median, 1000 * row.step_s.least, 1000 * row.step_s.greatest)
        name = f"{peers[row.trial.peer].title}, {row.trial.setting.value}"
        lines.append(f"| {row.trial.ranks} | {name} | {times[0]:.0f} ({times[1]:.0f}-{times[2]:.0f}) | {row.ratio} |")
    return "\n".join(lines) if len(lines) > 2 else ""
