"""Run torch's own tests of torchrun with `midstep run` in its place, and print a table of which pass.

python -m tests.versions.torch_launcher [NAME...]     NAME: part of FILE::TEST

They are in no package: check out pytorch, and name the place in MIDSTEP_PYTORCH; they import `expecttest`. A test
calls `main` of `torch.distributed.run`; here that runs `midstep run` with the same arguments in a process of its own,
hands on what it prints, and raises what the test expects of a refused line or a failed job. `elastic_launch`, which
some call instead, becomes the line that means the same, with a meeting point on this machine in place of their etcd.
Exit status 1 when a test ends otherwise than DIFFERENT says.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.launcher.api import LaunchConfig

from midstep.agent.fork_server import PRELOAD_STORE
from midstep.protocol import environment as names
from midstep.protocol.token import new_token, token_text

CHECKOUT = "MIDSTEP_PYTORCH"
FOLDER = Path("test", "distributed", "launcher")
FILES: Mapping[str, tuple[str, ...]] = {
    "test_run.py": ("torch.distributed.run.main",),
    "launch_test.py": ("torch.distributed.launch.main",),
    "api_test.py": ("torch_api_test.elastic_launch",),
}
LIMIT_S = 240.0
SHOWN = 300  # characters of an error, and of what was printed before it
REFUSED = 2  # click's exit status for a line that it does not take
_INSIDE = "looks into torchrun's own process, which is not there"
_FUNCTION = "launches a function: a line names a program"
# Why a test does not pass; one of api_test.py with the file's name where test_run.py has another of its name. All
# others do.
DIFFERENT: Mapping[str, str] = {
    "test_is_torchelastic_launched_with_logs_spec_defined": "`--logs-specs` is refused: logs are in the job directory",
    "test_launch_elastic_agent_raise_exception": f"mocks torchrun's agent; {_INSIDE}",
    "test_launch_elastic_worker_raise_exception": f"the job fails as it should, then it {_INSIDE}: `events.record`",
    "test_launch_shutdown": f"mocks torchrun's agent; {_INSIDE}",
    "test_launch_with_env": "`--use-env` is of `torch.distributed.launch`, which torch has deprecated",
    "test_launch_without_env": "`--local-rank` of `torch.distributed.launch`: scripts read LOCAL_RANK",
    "test_init_method_tcp_with_torchelastic": "the store is at MASTER_PORT of its generation; `env://` finds it",
    "test_nproc_gpu_launch_configurations": f"mocks the number of GPUs; {_INSIDE}",
    "test_nproc_xpu_launch_configurations": "midstep has no device `xpu`",
    "test_launch_function": _FUNCTION,
    "test_launch_dist_sum_with_static_rdzv": _FUNCTION,
    "api_test.test_launch_elastic_multiple_agents": "starts torch's own launcher in a second process",
}
# Calls no launcher: what passes says nothing about one.
OF_TORCH_ALONE = frozenset(
    {
        "test_min_max_nodes_parse",
        "test_is_not_torchelastic_launched",
        "test_get_entrypoint_name",
        "test_rdzv_handler_shutdown_on_agent_error",
        "test_rdzv_handler_shutdown_on_agent_signal",
    }
)


class Outcome(unittest.TestResult):
    """The result of one test: `ended` says how, in a word."""

    ended = "passes"
    said = ""

    def addFailure(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802 - unittest's name
        """Note an assertion that failed."""
        self._note("fails", err)

    def addError(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802 - unittest's name
        """Note an exception."""
        self._note("fails", err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 - unittest's name
        """Note why it was passed over."""
        self.ended, self.said = "skipped", reason

    def _note(self, ended: str, err: object) -> None:
        assert isinstance(err, tuple)
        self.ended, self.said = ended, " ".join(str(err[1]).split())[:SHOWN]


def launch(arguments: Sequence[str] | None = None) -> None:
    """Run `midstep run` in torchrun's place. Raises ValueError for a refused line, ChildFailedError for a failure."""
    given = list(arguments or ())
    environment = dict(os.environ)
    meets = any(each.replace("_", "-").startswith("--rdzv-endpoint") for each in given)
    if meets:  # as on machines that have the job's token in their environment
        environment["MIDSTEP_TOKEN"] = os.environ["MIDSTEP_TEST_TOKEN"]
    done = subprocess.run(
        [sys.executable, "-m", "midstep.cli.main", "run", *given],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode == REFUSED:
        raise ValueError(done.stderr)
    if done.returncode != 0:
        failure = ProcessFailure(local_rank=0, pid=0, exitcode=done.returncode, error_file="")
        raise ChildFailedError(done.stderr, {0: failure})


class ElasticLaunch:
    """Stands in for torch's `elastic_launch`."""

    def __init__(self, config: LaunchConfig, entrypoint: object) -> None:
        self._config, self._entrypoint = config, entrypoint

    def __call__(self, *arguments: str) -> dict[int, object]:
        """Run the line that means the same. Raises as `launch`, and NotImplementedError for a function."""
        if not isinstance(self._entrypoint, str):
            raise NotImplementedError(_FUNCTION)
        config = self._config
        shape = [f"--nnodes={config.min_nodes}:{config.max_nodes}", f"--nproc-per-node={config.nproc_per_node}"]
        meeting = [f"--rdzv-endpoint={config.rdzv_endpoint}", f"--rdzv-id={config.run_id or uuid.uuid4().hex}"]
        rest = [f"--max-restarts={config.max_restarts}", "--rdzv-conf=last_call_timeout=1", "--no-python"]
        launch([*shape, *meeting, *rest, self._entrypoint, *arguments])
        return {}


def module_of(path: Path) -> ModuleType:
    """Load a file of tests as a module that the processes it forks know."""
    spec = importlib.util.spec_from_file_location(f"torch_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Return the tests of a suite one by one."""
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from tests_of(each)
        else:
            yield each


def run_one(test: unittest.TestCase, replaced: tuple[str, ...]) -> Outcome:
    """Run one test with `midstep run` in torchrun's place, in a home of its own."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        variables = {
            "MIDSTEP_HOME": home,
            "MIDSTEP_TEST_TOKEN": token_text(new_token()),
            names.PRELOAD: PRELOAD_STORE,
        }
        stack.enter_context(mock.patch.dict(os.environ, variables))
        for name in replaced:
            stack.enter_context(mock.patch(name, ElasticLaunch if name.endswith("elastic_launch") else launch))
        port = get_free_port()  # type: ignore[no-untyped-call]
        endpoint = f"localhost:{port}"
        stack.enter_context(mock.patch.object(type(test), "_etcd_endpoint", endpoint, create=True))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        test.run(outcome)
    if outcome.ended == "fails":
        outcome.said = " ".join(f"{outcome.said} {errors.getvalue()[-SHOWN:]}".split())
    return outcome


def main() -> int:
    """Run the tests and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of FILE::TEST; all without")
    wanted = parser.parse_args().names
    if CHECKOUT not in os.environ:
        print(f"{CHECKOUT} names no checkout of pytorch", file=sys.stderr)
        return REFUSED
    bad = False
    print("| test | outcome | why | s |\n| --- | --- | --- | --- |", flush=True)
    for file, replaced in FILES.items():
        module = module_of(Path(os.environ[CHECKOUT]) / FOLDER / file)
        for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)):
            name = test.id().rpartition(".")[2]
            if wanted and not any(each in f"{file}::{name}" for each in wanted):
                continue
            began = time.monotonic()
            outcome = run_one(test, replaced)
            differs = DIFFERENT.get(f"{Path(file).stem}.{name}") or DIFFERENT.get(name, "")
            why = differs or ("calls no launcher" if name in OF_TORCH_ALONE else "")
            expected = outcome.ended == "skipped" or (outcome.ended == "fails") == bool(differs)
            bad = bad or not expected
            said = why if expected and why else outcome.said
            print(f"| `{name}` | {outcome.ended} | {said} | {time.monotonic() - began:.0f} |", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
