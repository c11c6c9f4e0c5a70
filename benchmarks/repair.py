"""How fast lost state comes back: a repair's transfer beside what the transport alone does, in the same processes."""

import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from midstep.benchmarks import figures

LIMIT_S = 300.0
WARM_UP = 2  # rounds that are not counted: the first of everything


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run both processes; return what the source and the newcomer wrote down. Raises ClickException."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as folder:
        notes = [Path(folder) / f"{rank}.json" for rank in range(2)]
        script = str(Path(__file__).with_name("repair_job.py"))
        processes = [
            subprocess.Popen([sys.executable, script, str(rank), str(port), str(rounds + WARM_UP), str(notes[rank])])
            for rank in range(2)
        ]
        try:
            for process in processes:
                if process.wait(LIMIT_S) != 0:
                    raise click.ClickException(f"a process of the pair ended with status {process.returncode}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        source, newcomer = (json.loads(path.read_text()) for path in notes)
        return source, newcomer


@click.command()
@click.option("--repeat", type=click.IntRange(min=1), default=15, show_default=True, help="Repairs.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures to FILE.")
def main(repeat: int, file: Path | None) -> None:
    """Measure the transfer of a repair beside the transport alone.

    Two processes over gloo on this machine, 126 MB: a GPT of 10.5 million parameters with Adam's state. By turns the
    bytes move 4 MiB at a time into memory that was used before, and as a repair moves them, with checksums, after a
    link-up, into the memory of a process that has no optimizer state yet. Both are measured at the receiver.
    """
    source, newcomer = measure(repeat)
    rounds = newcomer["rounds"][WARM_UP:]
    shares = [each["repair"] / each["raw"] for each in rounds]
    opening = [each["stages"]["open_shard"] for each in source["rounds"][WARM_UP:]]
    stages = {"open": statistics.median(opening)}
    for name in ("accept", "adopt"):
        stages[name] = statistics.median(each["stages"][f"{name}_shard"] for each in rounds)
    result = {
        "repair_bytes_per_s": figures.spread([each["repair"] for each in rounds]),
        "transport_bytes_per_s": figures.spread([each["raw"] for each in rounds]),
        "share": figures.spread(shares),
        "stages_s": stages,
        "machine": figures.machine(),
    }
    repair, transport = (figures.text(result[f"{name}_bytes_per_s"], 1e-9) for name in ("repair", "transport"))
    share = figures.text(result["share"])
    click.echo(f"state came at {repair} GB/s, the transport alone does {transport} GB/s: {share} of it")
    click.echo("milliseconds in Python: " + ", ".join(f"{name} {1000 * spent:.1f}" for name, spent in stages.items()))
    if file is not None:
        file.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
