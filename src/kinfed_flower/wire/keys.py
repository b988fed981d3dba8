"""A federation's keys: a certificate authority, the server's certificate, and a key pair for each site."""

import datetime
import hashlib
import ipaddress
import os
import re
import shutil
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kinfed.errors import UsageError
from kinfed.files import replacing

AUTHORITY, SERVER = 20, 2  # years that certificates are valid: a new authority's must be given to each site by hand
SOON = datetime.timedelta(days=30)  # how long before its end there are warnings about a certificate
YEAR = datetime.timedelta(days=365)
MEMBERS = "members.txt"  # the public keys of all sites, for those that take part in masked sums
LOOPBACK = ("localhost", "127.0.0.1")
_RENEW_SERVER = "renew it: kinfed flower keys DIR --host NAME, then kinfed flower down and up"
_RENEW_CA = "to make a new one, move ca.crt and ca.key away and run kinfed flower keys DIR; see docs/deploy.md"
_ASK_FOR_CA = "ask the server's operator for the new ca.crt"
_Names = x509.SubjectAlternativeName
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"  # of a site


def check_name(client: str) -> None:
    """Raise UsageError for a name that no site can have."""
    if not re.fullmatch(NAME, client):
        long = "; at most 100 of them" if len(client) > 100 else ""
        raise UsageError(f"a site's name consists of letters, digits, '.', '_' and '-'; got {client!r:.120}{long}")


def fingerprint(key: bytes) -> str:
    """A short name of a public key."""
    return hashlib.sha256(key).hexdigest()[:16]


def make(folder: Path, hosts: Sequence[str], clients: Sequence[str]) -> list[Path]:
    """Make what is missing of a federation's keys, and return the folders to hand to new sites.

    `hosts` are the names and addresses by which sites reach the server; if given, its certificate is replaced. The
    authority and the keys of sites are never replaced; if the authority is missing, a new one is made, and the server's
    certificate, by default for the same names, and the copies of ca.crt in the sites' folders are replaced with it.
    Raises UsageError for names that cannot be used, and for an authority that is about to expire.
    """
    for client in clients:
        check_name(client)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    named = [_name(host) for host in dict.fromkeys([*LOOPBACK, *hosts])]
    certify = bool(hosts) or not (folder / "server.crt").exists()
    if not (folder / "ca.crt").exists():
        if not certify:
            certify = True
            named = list(_read(folder / "server.crt").extensions.get_extension_for_class(_Names).value)
        _make_authority(folder)
        for old in folder.glob("sites/*/ca.crt"):
            write_key(old, (folder / "ca.crt").read_bytes())
    elif certify and not (folder / "ca.key").exists():
        raise UsageError(f"{folder} has the authority's ca.crt but not its ca.key, which must sign the certificate")
    elif certify and (end := _read(folder / "ca.crt").not_valid_after_utc) < _now() + SOON:
        raise UsageError(
            f"the authority {folder / 'ca.crt'} expires on {end:%Y-%m-%d}, with all that it signs; {_RENEW_CA}"
        )
    if certify:
        _certify_server(folder, named)
    made = []
    for client in clients:
        site = folder / "sites" / client
        if (site / "key.pub").exists():  # made here, or at the site, which then sends only the public half
            continue
        site.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Flower takes NIST curves only.
        key = ec.generate_private_key(ec.SECP384R1())
        form = serialization.PrivateFormat.OpenSSH
        private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        shutil.copy(folder / "ca.crt", site / "ca.crt")
        write_key(site / "key", private, secret=True)
        write_key(site / "key.pub", public + b"\n")  # last: a site that has one is done
        made.append(site)
    lines = [f"{path.parent.name} {path.read_text().strip()}\n" for path in sorted(folder.glob("sites/*/key.pub"))]
    if lines:
        write_key(folder / MEMBERS, "".join(lines).encode())
    return made


def members(folder: Path, complain: Callable[[str], object] = lambda why: None) -> dict[bytes, str]:
    """The public keys in a federation's keys, in the form in which Flower stores them, and the site of each.

    Files that cannot be such a key are left out, and complained about.
    """
    keys: dict[bytes, str] = {}
    for path in sorted(folder.glob("sites/*/key.pub")):
        site = path.parent.name
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except (ValueError, OSError, UnsupportedAlgorithm) as problem:
            complain(f"{path} is not a public key, so {site} is not admitted: {problem}")
            continue
        if not isinstance(key, ec.EllipticCurvePublicKey):
            complain(
                f"{path}: Flower accepts only keys such as ssh-keygen -t ecdsa -b 384 makes, so {site} is not admitted"
            )
            continue
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        public = key.public_bytes(serialization.Encoding.PEM, form)
        if public in keys:
            complain(f"{path} is also the key of {keys[public]}, so {site} is not admitted; give every site its own")
            continue
        keys[public] = site
    return keys


def endings(folder: Path) -> list[str]:
    """Warnings about the certificates in the server's folder, or a site's, that are about to expire or have expired."""
    warnings = []
    at_server = (folder / "server.crt").exists()
    fixes = {"ca.crt": _RENEW_CA if at_server else _ASK_FOR_CA, "server.crt": _RENEW_SERVER}
    for path in (folder / name for name in fixes if (folder / name).exists()):
        end = _read(path).not_valid_after_utc
        if end < _now() + SOON:
            verb = "expired" if end < _now() else "expires"
            warnings.append(
                f"CAUTION: {path} {verb} on {end:%Y-%m-%d}; nobody can connect after that; {fixes[path.name]}"
            )
    return warnings


def is_shown(certificate: Path, address: str) -> bool:
    """Whether the server at HOST:PORT uses that certificate."""
    host, _, port = address.rpartition(":")
    shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=10)
    return x509.load_pem_x509_certificate(shown.encode()) == _read(certificate)


def _make_authority(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kinfed federation")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )  # certificates and their recall
    built = _certificate(name, name, key.public_key(), _now() + AUTHORITY * YEAR)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    built = built.add_extension(usage, critical=True)
    built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    write_key(folder / "ca.key", _pem(key), secret=True)
    write_key(folder / "ca.crt", built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def _certify_server(folder: Path, names: Sequence[x509.GeneralName]) -> None:
    """The server is also reached on its own machine, by the programs that it starts."""
    authority = _read(folder / "ca.crt")
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )  # signatures
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kinfed server")])
    end = min(_now() + SERVER * YEAR, authority.not_valid_after_utc)
    built = _certificate(authority.subject, name, key.public_key(), end)
    built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(usage, critical=True)
    built = built.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    built = built.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    write_key(folder / "server.crt", built.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    write_key(folder / "server.key", _pem(key), secret=True)


def _certificate(
    issuer: x509.Name, subject: x509.Name, public: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(end)
    )


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise UsageError(f"{path} is not a certificate; expected one that kinfed flower keys made") from None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise UsageError(f"'{host}' is neither the name nor the address of a host; leave out http:// and the port")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def write_key(path: Path, content: bytes, secret: bool = False) -> None:
    """Write a key or a certificate; one that is secret is readable by its owner alone."""
    with replacing(path) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
