"""Keys: a certificate authority, the server's certificate, and one key pair a site."""

import datetime
import ipaddress
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import UsageError
from ..files import replacing
from .courier import NAME

YEARS = 5
LOOPBACK = ("localhost", "127.0.0.1")


def make(folder: Path, hosts: Sequence[str], clients: Sequence[str]) -> list[Path]:
    """Make what is missing of a federation's keys and return the folders to hand to new sites.

    `hosts` are the names and addresses at which sites reach the server; if given, its certificate is made anew. The
    authority and the keys of sites are never replaced. Raises UsageError for names that cannot be used.
    """
    for client in clients:
        if not re.fullmatch(NAME, client):
            raise UsageError(f"a site is named by letters, digits, '.', '_' and '-'; got '{client}'")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    certify = bool(hosts) or not (folder / "server.crt").exists()
    if not (folder / "ca.crt").exists():
        _make_authority(folder)
    elif certify and not (folder / "ca.key").exists():
        raise UsageError(f"{folder} has the authority's ca.crt without its ca.key, which must sign the certificate")
    if certify:
        _certify_server(folder, hosts)
    made = []
    for client in clients:
        site = folder / "sites" / client
        if (site / "key.pub").exists():  # made here, or at the site, which then sends the public half alone
            continue
        site.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Flower takes NIST curves only.
        key = ec.generate_private_key(ec.SECP384R1())
        form = serialization.PrivateFormat.OpenSSH
        private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        shutil.copy(folder / "ca.crt", site / "ca.crt")
        _write(site / "key", private, secret=True)
        _write(site / "key.pub", public + b"\n")  # last: a site that has one is done
        made.append(site)
    return made


def _make_authority(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kinfed federation")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # certificates and their recall
    built = _certificate(name, name, key.public_key())
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    built = built.add_extension(usage, critical=True)
    built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    _write(folder / "ca.key", _pem(key), secret=True)
    _write(folder / "ca.crt", built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def _certify_server(folder: Path, hosts: Sequence[str]) -> None:
    """The server is also reached on its own machine, by the programs that it starts."""
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_name(host) for host in dict.fromkeys([*LOOPBACK, *hosts])]
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)  # signatures
    built = _certificate(
        authority.subject, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kinfed server")]), key.public_key()
    )
    built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(usage, critical=True)
    built = built.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    built = built.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    _write(folder / "server.crt", built.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.key", _pem(key), secret=True)


def _certificate(issuer: x509.Name, subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise UsageError(f"'{host}' is neither a host's name nor its address; leave out http:// and the port")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    with replacing(path) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
