"""The address of a job in etcd: what is taken, what is refused, and which keys follow from it."""

import pytest

from midstep.controller.etcd.client import Etcd
from midstep.controller.etcd.place import Access, access_of, number_of, numbered, parse_place
from midstep.protocol.errors import ConfigurationError


@pytest.mark.parametrize(
    ("url", "endpoints", "root"),
    [
        ("etcd://a", (("a", 2379),), "/midstep/demo/"),
        ("etcd://a:1,[::1]:2", (("a", 1), ("::1", 2)), "/midstep/demo/"),
        ("etcds://a/team/jobs/", (("a", 2379),), "/team/jobs/demo/"),
    ],
)
def test_members_and_prefix_are_taken(url: str, endpoints: tuple[tuple[str, int], ...], root: str) -> None:
    place = parse_place(url, "demo")
    assert (place.endpoints, place.root) == (endpoints, root)
    assert place.protocol == ("https" if url.startswith("etcds") else "http")
    assert str(place).startswith(url.partition(":")[0])


@pytest.mark.parametrize(
    "url",
    ["", "a:1", "http://a:1", "etcd://", "etcd://a:x", "etcd://a,,b", "etcd://me@a", "etcd://a/b c", "etcd://a:0x1"],
)
def test_what_is_no_address_is_refused_with_what_one_looks_like(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"not the address of an etcd. Write etcd://HOST:PORT"):
        parse_place(url, "demo")


def test_keys_sort_as_their_numbers_do() -> None:
    place = parse_place("etcd://a", "demo")
    keys = [numbered(place.batches, number) for number in (1, 9, 10, 99, 100, 10**9)]
    assert keys == sorted(keys)
    assert [number_of(f"{key}/000001", place.batches) for key in keys] == [1, 9, 10, 99, 100, 10**9]


def test_certificates_and_user_are_those_of_etcdctl() -> None:
    files = {"ETCDCTL_CACERT": "ca", "ETCDCTL_CERT": "cert", "ETCDCTL_KEY": "key"}
    assert access_of(files) == Access("ca", "cert", "key")
    assert access_of({}) == Access()
    assert access_of({**files, "ETCDCTL_USER": "me:a:b"}) == Access("ca", "cert", "key", "me", "a:b")
    assert access_of({"ETCDCTL_USER": "me", "ETCDCTL_PASSWORD": "secret"}) == Access(user="me", password="secret")
    with pytest.raises(ConfigurationError, match="names no password"):
        access_of({"ETCDCTL_USER": "me"})


def test_a_password_is_not_in_messages() -> None:
    place = parse_place("etcd://a", "demo", Access(user="me", password="secret"))
    assert "secret" not in f"{place} {place!r}"


def test_a_missing_library_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'midstep\[etcd\]'"):
        Etcd(parse_place("etcd://a", "demo"))


def test_a_connection_has_the_files_of_the_job_and_nothing_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables for proxies and authorities of others would go before its own."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/of/others")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    session = Etcd(parse_place("etcds://a", "demo", Access("ca", "cert", "key")))._connect("a", 1).session
    settings = session.merge_environment_settings("https://a:1", {}, False, None, None)
    assert (settings["verify"], settings["cert"], dict(settings["proxies"])) == ("ca", ("cert", "key"), {})
