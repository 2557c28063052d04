"""Keys and certificates: what is made, who can read it, and a clear sentence for each thing that can be wrong."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives import serialization
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message, verify_signature

from privrep.errors import InputError
from privrep.federated import credentials
from privrep.federated.credentials import make_keys, read_ca, read_node_key, read_node_keys, read_server_tls


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    make_keys(folder / "keys", folder / "carry", ["north", "south"], ["fed.example.org", "192.0.2.7"])
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """Keys of one's own to damage."""
    for path in sorted(made.rglob("*")):
        new = tmp_path / path.relative_to(made)
        if path.is_dir():
            new.mkdir(mode=0o700)
        else:
            new.write_bytes(path.read_bytes())
            new.chmod(0o600)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_is_readable_by_its_owner_alone(made: Path) -> None:
    found = {str(path.relative_to(made)): mode(path) for path in made.rglob("*")}
    folders = {"keys", "keys/nodes", "carry", "carry/north", "carry/south"}
    server = {"keys/ca.pem", "keys/ca.key", "keys/server.pem", "keys/server.key"}
    nodes = {"keys/nodes/north.pub", "keys/nodes/south.pub"}
    carried = {f"carry/{name}/{file}" for name in ("north", "south") for file in ("node.key", "ca.pem")}
    assert found == dict.fromkeys(folders, 0o700) | dict.fromkeys(server | nodes | carried, 0o600)


def test_an_open_umask_makes_no_difference(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "keys", tmp_path / "carry", ["a"], [])
    finally:
        os.umask(before)
    assert {mode(path) for path in tmp_path.rglob("*") if path.is_dir()} == {0o700}
    assert {mode(path) for path in tmp_path.rglob("*") if path.is_file()} == {0o600}


def test_flower_reads_the_keys_of_nodes_and_they_belong_together(made: Path) -> None:
    public = read_node_keys(made / "keys")
    assert list(public) == ["north", "south"]
    for name, data in public.items():
        path = made / "carry" / name / "node.key"
        key = serialization.load_ssh_private_key(path.read_bytes(), None)  # as flower-supernode does
        assert try_load_public_key(made / "keys" / "nodes" / f"{name}.pub") == data
        assert public_key_to_bytes(key.public_key()) == data  # type: ignore[arg-type]
        ours = read_node_key(path)
        assert verify_signature(ours.public_key(), b"round", sign_message(ours, b"round"))
        assert ours.curve.name == "secp384r1"
    assert public["north"] != public["south"]


def _handshake(certificates: Path, ca: Path, host: str) -> str:
    """What a client that trusts `ca` alone gets of a server with these files, asked for under this name."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    client = ssl.create_default_context(cafile=str(ca))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            serving.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=host) as secured:
            return str(secured.version())
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        ours.close()
        thread.join(10)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "fed.example.org", "192.0.2.7"])
def test_a_handshake_works_for_every_host_that_was_named_and_for_loopback(made: Path, host: str) -> None:
    assert _handshake(made / "keys", made / "carry" / "north" / "ca.pem", host) == "TLSv1.3"
    assert read_server_tls(made / "keys", host).key == made / "keys" / "server.key"


def test_a_handshake_fails_for_another_host_and_another_authority(made: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", tmp_path / "carry", ["a"], [])
    assert "mismatch" in _handshake(made / "keys", made / "keys" / "ca.pem", "other.example.org")
    assert "unable to get local issuer" in _handshake(made / "keys", tmp_path / "keys" / "ca.pem", "localhost")


def test_nodes_are_added_and_hosts_changed_by_the_same_authority(copied: Path) -> None:
    keys, carry = copied / "keys", copied / "carry"
    before = {name: (keys / name).read_bytes() for name in ("ca.pem", "server.pem")}
    assert not make_keys(keys, carry, ["west"], [])
    assert {name: (keys / name).read_bytes() for name in before} == before
    assert list(read_node_keys(keys)) == ["north", "south", "west"]
    assert (carry / "west" / "ca.pem").read_bytes() == before["ca.pem"]
    assert make_keys(keys, carry, [], ["new.example.org"])
    assert (keys / "ca.pem").read_bytes() == before["ca.pem"]
    assert _handshake(keys, carry / "north" / "ca.pem", "new.example.org") == "TLSv1.3"
    assert "mismatch" in _handshake(keys, carry / "north" / "ca.pem", "fed.example.org")


@pytest.mark.parametrize(
    ("nodes", "hosts", "sentence"),
    [
        ([], [], "name the nodes"),
        (["north"], [], "north.pub exists already"),
        (["a", "a"], [], "more than once"),
        (["../a"], [], "letters, digits"),
        ([".hidden"], [], "letters, digits"),
        (["a" * 65], [], "64 at most"),
        (["é"], [], "letters, digits"),
        (["a"], ["host:80"], "without a port"),
        (["a"], [""], "without a port"),
        (["a"], ["*.example.org"], "without a port"),
    ],
)
def test_what_cannot_be_made_is_refused_and_leaves_nothing(
    copied: Path, nodes: list[str], hosts: list[str], sentence: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    with pytest.raises(InputError, match=sentence):
        make_keys(copied / "keys", copied / "carry", nodes, hosts)
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


def test_without_the_key_of_the_authority_nothing_is_signed(copied: Path) -> None:
    (copied / "keys" / "ca.key").unlink()
    with pytest.raises(InputError, match=r"there is no file .*ca\.key"):
        make_keys(copied / "keys", copied / "carry", ["a"], ["new.example.org"])
    assert not (copied / "carry" / "a").exists()


@pytest.mark.parametrize("open_to", [0o040, 0o004, 0o020, 0o002])
def test_a_private_key_that_others_can_touch_is_not_used(copied: Path, open_to: int) -> None:
    for path, read in _private_keys(copied).items():
        path.chmod(0o600 | open_to)
        with pytest.raises(InputError, match=r"others can read; run chmod 600"):
            read()
        path.chmod(0o600)
        read()


def _private_keys(folder: Path) -> dict[Path, Callable[[], object]]:
    node = folder / "carry" / "north" / "node.key"
    return {
        folder / "keys" / "server.key": lambda: read_server_tls(folder / "keys", "localhost"),
        node: lambda: read_node_key(node),
    }


@pytest.mark.parametrize("name", ["ca.pem", "server.pem", "server.key"])
def test_files_of_the_server_that_are_missing_or_something_else_are_named(copied: Path, name: str) -> None:
    keys = copied / "keys"
    (keys / name).write_bytes(b"something else")
    with pytest.raises(InputError, match=rf"{name} is not a"):
        read_server_tls(keys, "localhost")
    (keys / name).unlink()
    with pytest.raises(InputError, match=rf"there is no file .*{name}; make keys with: privrep federate keys"):
        read_server_tls(keys, "localhost")
    (keys / name).mkdir()
    with pytest.raises(InputError, match="is a folder"):
        read_server_tls(keys, "localhost")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_named(copied: Path) -> None:
    (copied / "keys" / "server.key").chmod(0)
    with pytest.raises(InputError, match=r"server\.key cannot be read"):
        read_server_tls(copied / "keys", "localhost")


def test_files_that_do_not_belong_together_are_refused(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    make_keys(other / "keys", other / "carry", ["a"], [])
    keys = copied / "keys"
    right = (keys / "server.key").read_bytes()
    (keys / "server.key").write_bytes((other / "keys" / "server.key").read_bytes())
    with pytest.raises(InputError, match=r"server\.key is not the key of"):
        read_server_tls(keys, "localhost")
    (keys / "server.key").write_bytes(right)
    (keys / "ca.pem").write_bytes((other / "keys" / "ca.pem").read_bytes())
    with pytest.raises(InputError, match="is not of the authority"):
        read_server_tls(keys, "localhost")


def test_a_host_that_the_certificate_does_not_name_is_refused(made: Path) -> None:
    with pytest.raises(InputError, match=r"is for localhost, .*fed\.example\.org.* not for 198\.51\.100\.1; make one"):
        read_server_tls(made / "keys", "198.51.100.1")
    assert read_server_tls(made / "keys", "0.0.0.0")  # everywhere: nodes say which name they use
    assert read_server_tls(made / "keys", "FED.example.org")


def test_certificates_are_for_a_year_and_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Then(datetime.datetime):
        days = 0

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.now(tz) + datetime.timedelta(days=cls.days)

    monkeypatch.setattr(credentials, "datetime", Then)
    keys = tmp_path / "keys"
    make_keys(keys, tmp_path / "carry", ["a"], [])
    for Then.days in (0, 364):
        assert read_server_tls(keys, "localhost")
    Then.days = 366
    with pytest.raises(InputError, match=r"ca\.pem is a certificate that expired on 20"):
        read_server_tls(keys, "localhost")
    with pytest.raises(InputError, match="expired"):
        read_ca(tmp_path / "carry" / "a" / "ca.pem")
    with pytest.raises(InputError, match="expired"):
        make_keys(keys, tmp_path / "carry", ["b"], [])
    Then.days = -1
    with pytest.raises(InputError, match="check the clock"):
        read_server_tls(keys, "localhost")


def test_a_certificate_never_outlives_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, tmp_path / "carry", ["a"], [])
    monkeypatch.setattr(credentials, "VALID", datetime.timedelta(days=4000))
    make_keys(keys, tmp_path / "carry", [], ["fed.example.org"])
    authority, server = (credentials._read_certificate(keys / name) for name in ("ca.pem", "server.pem"))
    assert server.not_valid_after_utc == authority.not_valid_after_utc


def test_keys_of_nodes_that_are_wrong_are_named(copied: Path) -> None:
    nodes, key = copied / "keys" / "nodes", copied / "carry" / "north" / "node.key"
    (nodes / "twin.pub").write_bytes((nodes / "north.pub").read_bytes())
    with pytest.raises(InputError, match=r"twin\.pub holds the key of node north"):
        read_node_keys(copied / "keys")
    (nodes / "twin.pub").write_text("ssh-rsa AAAA no key")
    with pytest.raises(InputError, match=r"twin\.pub is not a public key"):
        read_node_keys(copied / "keys")
    for path in nodes.iterdir():
        path.unlink()
    with pytest.raises(InputError, match="no public keys of nodes"):
        read_node_keys(copied / "keys")
    key.write_bytes((copied / "keys" / "server.key").read_bytes())
    with pytest.raises(InputError, match=r"node\.key is not a private key in OpenSSH's format"):
        read_node_key(key)
    with pytest.raises(InputError, match="there is no file"):
        read_node_key(copied / "nowhere")


@pytest.mark.parametrize(
    ("host", "stays"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.7", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_what_counts_as_loopback(host: str, stays: bool) -> None:
    assert credentials.is_loopback(host) is stays
