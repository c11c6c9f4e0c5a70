"""`midstep run --platform kubernetes --acjob NAME`: the policy is that of the AscendJob as the API has it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from midstep.cli import run
from midstep.policies.acjob.translation import translate
from midstep.policies.files import load_policy

from .api_server import served

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "acjob.yaml"
NAME = "gpt-16npu"
TYPED = ("--platform", "kubernetes", "--image", "image", "--nnodes", "2", "--nproc-per-node", "8", "--dry-run")


def in_the_cluster() -> dict[str, Any]:
    """Return the example's AscendJob, as the API gives it back."""
    (found,) = (each for each in yaml.safe_load_all(EXAMPLE.read_text()) if each["kind"] == "AscendJob")
    own = {"namespace": "default", "uid": "u", "creationTimestamp": "2026-11-23T10:00:00Z", "generation": 1}
    metadata: dict[str, Any] = {**found["metadata"], **own}
    return {**found, "metadata": metadata, "status": {"conditions": [{"type": "Running", "status": "True"}]}}


def typed(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, there: dict[str, Any] | None = None) -> Result:
    """Type the command, with an API that has one AscendJob, or none."""

    async def scenario() -> Result:
        async with served(folder) as (server, config):
            monkeypatch.setenv("KUBECONFIG", str(config))
            if there is not None:
                server.put("ascendjobs", there)
            return await asyncio.to_thread(CliRunner().invoke, run.command, [*TYPED, *words, "t.py"])

    return asyncio.run(scenario())


def test_the_policy_is_what_the_jobs_labels_and_annotations_say_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were changed after the job had been submitted: `recover` alone is allowed by now."""
    job = in_the_cluster()
    job["metadata"]["annotations"]["recover-strategy"] = "recover"
    result = typed(tmp_path, monkeypatch, "--acjob", NAME, there=job)

    assert result.exit_code == 0, result.output
    objects = list(yaml.safe_load_all(result.stdout))
    text = next(each for each in objects if each["kind"] == "ConfigMap")["data"]["policy.yaml"]
    assert text.startswith(f"# Made by `midstep policy from-acjob` from default/{NAME}, line ")
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    given = EXAMPLE.read_text().replace('"retry,recover-in-place,recover,elastic-training,dump,exit"', '"recover"')
    translated = translate(given, "the file")
    assert load_policy(file) == translated.policy
    assert translated.notes
    assert all(str(note).partition("line ")[0] in result.stderr for note in translated.notes)


def test_an_ascendjob_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = typed(tmp_path, monkeypatch, "--acjob", NAME)

    assert result.exit_code == 1
    assert f"--acjob {NAME}: the namespace default has no AscendJob of that name" in result.output


def test_one_that_is_wrong_is_refused_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = in_the_cluster()
    job["metadata"]["labels"]["fault-scheduling"] = "often"
    result = typed(tmp_path, monkeypatch, "--acjob", NAME, there=job)

    assert result.exit_code == 1
    assert f"default/{NAME}: line " in result.output
    assert "metadata.labels.fault-scheduling: found the text 'often'; allowed: grace, force, off" in result.output


def test_two_policies_are_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text("ladder: [stop]\n")
    words = ("--acjob", NAME, "--policy", str(tmp_path / "own.yaml"))
    result = typed(tmp_path, monkeypatch, *words, there=in_the_cluster())

    assert result.exit_code == 1
    assert "--acjob and --policy both give the job's policy" in result.output
