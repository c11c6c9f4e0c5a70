"""Text that leaves the house has no secret in it, and all else is as it was."""

import pytest

from midstep.cli.bundle import Redactor, is_called_secret


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("export WANDB_API_KEY=abc123", "export WANDB_API_KEY=[removed]"),
        ('{"password": "hunter2", "step": 7}', '{"password": "[removed]", "step": 7}'),
        ("Authorization: Bearer abc.def", "Authorization: [removed]"),
        ("curl -H 'X: bearer abcdefgh12'", "curl -H 'X: [removed]'"),
        ("s3 AKIAABCDEFGHIJKLMNOP here", "s3 [removed] here"),
        ("pull https://ann:hunter2@host/x", "pull https://[removed]@host/x"),
        ("-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\nstep 7", "[removed]\nstep 7"),
        ("midstep1.abcdefghij", "[removed]"),
        ("hf_abcdefghijklmnopqrst", "[removed]"),
        ("key 8nm2jwN{%{vo%.=z.0oz<[.5B*gsN$6$)qR4=*/j, of a job that is gone", "key [removed], of a job that is gone"),
        ("the value is open sesame, twice: open sesame", "the value is [removed], twice: [removed]"),
    ],
)
def test_what_is_known_or_looks_like_a_secret_is_taken_out(text: str, left: str) -> None:
    assert Redactor(["open sesame"]).text(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "step 41220, loss 2.31, 3.1 steps/s",
        "tokens_per_s: 120000.5",
        "rank 3 on node1: ended by SIGKILL",
        "tcp://127.0.0.1:29400",
        '"token": null',
        "wrote /mnt/Checkpoints/gpt-7b/iter_00412/model",  # as long as a key of the control channel
        "HEAD is at 22136267aa0b1c2d3e4f5a6b7c8d9e0f1a2b3c4d",
    ],
)
def test_other_texts_are_left_as_they_are(text: str) -> None:
    assert Redactor(["open sesame", "abc", ""]).text(text) == text


def test_of_a_key_that_is_called_as_a_secret_no_text_is_left() -> None:
    tree = {
        "api_key": "x",
        "url_file": "/etc/a",
        "steps": [1, "open sesame"],
        "tokens": 3,
        "of": {"secret": ("a", "b")},
    }
    told = Redactor(["open sesame"]).tree(tree)
    assert told == {
        "api_key": "[removed]",
        "url_file": "/etc/a",
        "steps": [1, "[removed]"],
        "tokens": 3,
        "of": {"secret": ["[removed]", "[removed]"]},
    }
    assert not is_called_secret("MIDSTEP_TOKEN_FILE")
