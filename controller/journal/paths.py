"""Where the files of a journal lie."""

from pathlib import Path

JOURNAL_NAME = "journal.sqlite"


def journal_path(job_directory: str | Path) -> Path:
    """Return where the journal of a job lies."""
    return Path(job_directory) / JOURNAL_NAME


def lock_path(journal: Path) -> Path:
    """Return the file over which controllers of one host are elected."""
    return journal.with_name(journal.name + ".lock")
