"""Keys and certificates of a federation: they show who the server is, and which nodes it lets in.

KEYS/ca.pem, KEYS/ca.key          the authority that vouches for the server; its key is needed here alone
KEYS/server.pem, KEYS/server.key  the server's certificate, for the hosts it names
KEYS/nodes/NAME.pub               the public keys of the nodes that the server accepts
OUT/NAME/node.key, OUT/NAME/ca.pem  what one node needs: to be carried there, and deleted here

Formal guarantee:
* A private key is written readable by its owner alone.
* A private key that others can read is not used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from privrep.errors import InputError
from privrep.federated.wire.loopback import is_loopback as is_loopback

LOOPBACK = ("localhost", "127.0.0.1", "::1")
VALID = timedelta(days=365)
EARLY = timedelta(hours=1)  # clocks differ
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,62})(\.[A-Za-z0-9][A-Za-z0-9-]{0,62})*", re.ASCII)
_MAKE = "make keys with: privrep federate keys FOLDER --node NAME"
_ANEW = "make new ones, in another folder, with: privrep federate keys FOLDER --node NAME"


@dataclass(frozen=True)
class ServerTls:
    """The files with which a server shows who it is."""

    ca: Path
    certificate: Path
    key: Path


# Making them


def make_keys(keys: Path, out: Path, nodes: Sequence[str], hosts: Sequence[str]) -> bool:
    """Make keys for nodes and, where there are none yet, an authority and a server certificate.

    Called again it adds nodes. With hosts the server gets a new certificate for these, from the same authority. What is
    wrong with names, hosts or the folder is found before anything is made.

    Args:
        keys: the server's folder of keys.
        out: the folder with one folder for each new node, to be carried there.
        nodes: names of new nodes.
        hosts: names or addresses under which nodes reach the server.

    Returns:
        Whether the server got a new certificate.
    """
    if not nodes and not hosts:
        raise InputError("name the nodes that may join: --node NAME, once for each.")
    new = not (keys / "ca.pem").is_file()
    _check_new(keys, out, nodes, hosts, new)
    for folder in (keys, keys / "nodes", out):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if new:
        _make_authority(keys)
    if renewed := new or bool(hosts):
        _make_server(keys, hosts)
    for name in nodes:
        key, folder = ec.generate_private_key(ec.SECP384R1()), out / name
        folder.mkdir(mode=0o700)
        _write(folder / "ca.pem", (keys / "ca.pem").read_bytes())
        _write_key(folder / "node.key", key, serialization.PrivateFormat.OpenSSH)
        form = serialization.PublicFormat.OpenSSH
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, form)
        _write(keys / "nodes" / f"{name}.pub", public + f" {name}\n".encode())
    return renewed


def _check_new(keys: Path, out: Path, nodes: Sequence[str], hosts: Sequence[str], new: bool) -> None:
    """Raise InputError if a name, a host or a folder would stop `make_keys` half way."""
    for host in hosts:
        if _parse_address(host) is None and not _HOST.fullmatch(host):
            raise InputError(f"--host must be the name or the IP address of the server, without a port. Got {host!r}.")
    for place, name in enumerate(nodes):
        if not _NAME.fullmatch(name):
            raise InputError(f"a node's name is letters, digits, dots and dashes, 64 at most. Got {name!r} instead.")
        if name in nodes[:place]:
            raise InputError(f"--node names {name} more than once; name it once.")
        for path in (keys / "nodes" / f"{name}.pub", out / name):
            if path.exists():
                raise InputError(f"{path} exists already; choose another name, or delete it to replace that node.")
    if new and (keys / "server.pem").exists():
        raise InputError(f"{keys} has a server certificate but no ca.pem; restore it, or choose another folder.")
    if not new:
        authority = _read_certificate(keys / "ca.pem")
        _check_belongs(_read_pem_key(keys / "ca.key"), authority, keys / "ca.key", keys / "ca.pem")


def _make_authority(keys: Path) -> None:
    """Make the authority's key and its certificate, which it signs itself."""
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "privrep federation")])
    made = (
        _begin_certificate(name, name, key.public_key(), key.public_key(), now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_key(keys / "ca.key", key, serialization.PrivateFormat.PKCS8)
    _write(keys / "ca.pem", made.public_bytes(serialization.Encoding.PEM))


def _make_server(keys: Path, hosts: Sequence[str]) -> None:
    """Make the server's key and certificate, for these hosts and this machine, valid no longer than the authority."""
    authority, ca_key = _read_certificate(keys / "ca.pem"), _read_pem_key(keys / "ca.key")
    key = ec.generate_private_key(ec.SECP384R1())
    names = [_make_general_name(host) for host in dict.fromkeys((*LOOPBACK, *hosts))]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "privrep server")])
    ends = min(datetime.now(UTC) + VALID, authority.not_valid_after_utc)
    made = (
        _begin_certificate(subject, authority.subject, key.public_key(), ca_key.public_key(), ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    _write_key(keys / "server.key", key, serialization.PrivateFormat.PKCS8)
    _write(keys / "server.pem", made.public_bytes(serialization.Encoding.PEM))


def _begin_certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    ends: datetime,
) -> x509.CertificateBuilder:
    """Return a certificate that is not signed yet.

    Args:
        subject: the name of the certificate's owner.
        issuer: the name of the authority.
        key: the owner's public key.
        issuer_key: the authority's public key.
        ends: when the certificate expires; it is valid from now, less an hour for clocks that differ.
    """
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - EARLY)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _make_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Return what a key may be used for: to sign certificates alone, or to sign messages alone."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _make_general_name(host: str) -> x509.GeneralName:
    """Return a host as certificates name it: an IP address or a name."""
    address = _parse_address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _parse_address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that a text is, or None if it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """Write a private key, without a password, readable by its owner alone."""
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _write(path: Path, data: bytes) -> None:
    """Write a file for the owner's eyes alone, all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# Reading them


def read_server_tls(keys: Path, host: str) -> ServerTls:
    """Check all of the server's files before anybody connects, and return their paths.

    Args:
        keys: the server's folder of keys.
        host: the address to listen at, which the certificate must name unless it stands for all addresses.
    """
    tls = ServerTls(keys / "ca.pem", keys / "server.pem", keys / "server.key")
    authority, certificate = _read_certificate(tls.ca), _read_certificate(tls.certificate)
    _check_belongs(_read_pem_key(tls.key), certificate, tls.key, tls.certificate)
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise InputError(f"{tls.certificate} is not of the authority {tls.ca}; restore both, or {_ANEW}.") from None
    if host not in ("0.0.0.0", "::"):  # everywhere: nodes say which name they use
        _check_host(certificate, host, tls.certificate)
    return tls


def read_ca(path: Path) -> bytes:
    """Return the authority's certificate as PEM, by which a node knows the server."""
    _read_certificate(path)
    return _read_bytes(path)


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node's private key, in OpenSSH's format and on the curve P-384."""
    data = _read_private_bytes(path)
    try:
        key = serialization.load_ssh_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a private key in OpenSSH's format without a password; {_MAKE}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(f"{path} is not a key on the curve P-384; {_MAKE}.")
    return key


def read_node_keys(keys: Path) -> dict[str, bytes]:
    """Return the public keys of all nodes that are let in, by name; raise InputError if two names have one key."""
    found: dict[str, bytes] = {}
    for path in sorted((keys / "nodes").glob("*.pub")):
        data = _read_public_key(path)
        twin = next((name for name, known in found.items() if known == data), None)
        if twin is not None:
            raise InputError(f"{path} holds the key of node {twin}; a node is to have a key of its own.")
        found[path.stem] = data
    if not found:
        raise InputError(f"there are no public keys of nodes in {keys / 'nodes'}; {_MAKE}.")
    return found


def _read_public_key(path: Path) -> bytes:
    """Return a node's public key as PEM, by which Flower names nodes."""
    data = _read_bytes(path)
    try:
        key = serialization.load_ssh_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a public key in OpenSSH's format; {_MAKE}.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(f"{path} is not a key on the curve P-384; {_MAKE}.")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form)


def _read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate; raise InputError unless it is valid now."""
    data = _read_bytes(path)
    try:
        found = x509.load_pem_x509_certificate(data)
        starts, ends = found.not_valid_before_utc, found.not_valid_after_utc
    except ValueError:
        raise InputError(f"{path} is not a certificate in PEM format; {_MAKE}.") from None
    now = datetime.now(UTC)
    if now > ends:
        raise InputError(f"{path} is a certificate that expired on {ends:%Y-%m-%d}; {_ANEW}.")
    if now < starts:
        raise InputError(f"{path} is a certificate that is valid from {starts:%Y-%m-%d %H:%M} UTC; check the clock.")
    return found


def _read_pem_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key in PEM format."""
    data = _read_private_bytes(path)
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a private key in PEM format without a password; {_MAKE}.") from None
    return cast(ec.EllipticCurvePrivateKey, key)


def _check_belongs(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, path: Path, of: Path) -> None:
    """Raise InputError unless a key is the one of a certificate.

    Args:
        key: the private key.
        certificate: the certificate.
        path: the key's file, for the error sentence.
        of: the certificate's file, for the error sentence.
    """
    if key.public_key() != certificate.public_key():
        raise InputError(f"{path} is not the key of {of}; restore both, or {_ANEW}.")


def _check_host(certificate: x509.Certificate, host: str, path: Path) -> None:
    """Raise InputError unless a certificate names a host."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise InputError(f"{path} names no host at all; {_ANEW}.") from None
    listed = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    wanted = str(_parse_address(host) or host).lower()
    if wanted not in [name.lower() for name in listed]:
        raise InputError(
            f"{path} is for {', '.join(listed)}, not for {host}; make one with: privrep federate keys {path.parent} "
            f"--host {host}"
        )


def _read_private_bytes(path: Path) -> bytes:
    """Return the bytes of a private key; raise InputError if anybody but its owner can read the file."""
    data = _read_bytes(path)
    if os.stat(path).st_mode & 0o077:
        raise InputError(f"{path} is a private key that others can read; run chmod 600 {path}, or make a new one.")
    return data


def _read_bytes(path: Path) -> bytes:
    """Return all bytes of a file; raise InputError if it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"there is no file {path}; {_MAKE}.") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; name a file.") from None
    except PermissionError:
        raise InputError(f"{path} cannot be read; run the command as the owner of the file.") from None
