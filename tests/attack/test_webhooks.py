"""Webhooks that a policy names"""

import json
import time

import pytest

from midstep.controller.endpoints import posting
from midstep.controller.endpoints.posting import PostFailed, address_of
from midstep.controller.endpoints.webhooks import body_of, post
from midstep.policies.schema import WebhookPolicy, WebhookShape

from ..unit.test_webhooks import NOTICE, PATIENCE_S, Receiver, hook, receiver
from .attack import attack

__all__ = ["hook", "receiver"]


@attack(
    "an exception's text, which becomes a part of a notice, has a chat's mention of everybody, or a link",
    holds="it is shown as it was written, and calls nobody",
)
def test_in_a_chat_nobody_is_called_by_what_a_script_has_printed() -> None:
    told = json.loads(body_of(WebhookShape.SLACK, "demo", NOTICE))
    assert told == {"text": "midstep job demo: &lt;!channel&gt; a &amp; b"}


@attack(
    "the address in a webhook's file is http on another machine, has a password, several lines, or is none",
    holds="nothing is asked, and the address is not said",
    reads="webhook oncall: /etc/midstep/oncall.url: its URL is http, ...; only https leaves this machine",
)
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("not a url", "no URL in one line"),
        ("https:///path", "no URL in one line"),
        ("ftp://host/x", "no URL in one line"),
        ("https://host/x\nhttps://other/y", "no URL in one line"),
        ("https://host:port/x", "no URL in one line"),
        ("https://user:secret@host/x", "has a user in it"),
        ("http://hooks.example.com/x", "only https leaves this machine"),
        ("http://127.0.0.1.example.com/x", "only https leaves this machine"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_being_said(url: str, why: str) -> None:
    with pytest.raises(PostFailed, match=why) as caught:
        address_of(url, "/etc/url")
    assert str(caught.value).startswith("/etc/url: ")
    assert "secret" not in str(caught.value)


@attack(
    "a webhook answers with a redirect, to the metadata service of the cloud for example",
    holds="it is not followed, and the notice is tried again where the policy says",
    reads="webhook oncall: it answers 307, which leads elsewhere, and that is not followed",
)
@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirect_is_not_followed(receiver: Receiver, hook: WebhookPolicy, status: int) -> None:
    receiver.answers = [status]
    with pytest.raises(PostFailed, match=f"answers {status}, which leads elsewhere, and that is not followed"):
        post(hook, b"{}")
    assert len(receiver.got) == 1


@attack(
    "a webhook takes the connection, and answers a byte at a time without end",
    holds="it is cut after 10 s; it holds up its own thread and nothing else",
    reads="webhook oncall: it gave no answer in HTTP within 10 s",
)
def test_an_answer_that_comes_a_byte_at_a_time_is_cut(
    receiver: Receiver, hook: WebhookPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "TRY_S", 0.5)
    receiver.answers = [0]
    began_s = time.monotonic()
    with pytest.raises(PostFailed):
        post(hook, b"{}")
    assert time.monotonic() - began_s < PATIENCE_S / 2
