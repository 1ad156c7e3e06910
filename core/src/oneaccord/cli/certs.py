"""``oneaccord certs``: certificates for the ranks of a job."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneaccord.common.installing import install_command
from oneaccord.errors import UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    Authority = tuple[x509.Certificate, EllipticCurvePrivateKey]

__all__ = ["certs", "made", "new_authority", "revoking"]

_AUTHORITY = "authority of a job of oneaccord"
_FOR_ALL = "oneaccord"
_CA_CRT, _CA_KEY, _CRL = "ca.crt", "ca.key", "crl.pem"
_SKEW = timedelta(hours=1)
"""How far the clocks of hosts may differ."""


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are written; made if need be.", show_default=False)],
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST[=NAME,...]]...",
            help="One certificate for each, in DIR/HOST, which names the host and its other names and addresses; without, one in DIR for all ranks.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36500, help="How long they are valid.")] = 365,
    keep_authority: Annotated[
        bool,
        typer.Option(
            "--keep-authority", help="Write the authority's key to DIR/ca.key, for later certificates and revocations."
        ),
    ] = False,
    revoke: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Revoke the certificate in DIR/HOST: write crl.pem.", show_default=False),
    ] = None,
) -> None:
    """Make certificates by which the ranks of a job encrypt their connections (security.tls).

    Makes an authority, and certificates of it: ca.crt, tls.crt and tls.key. Keep each tls.key as you keep the secret. A key of the authority that
    is not kept signs nothing later: to replace one certificate, make all of them anew. A key that is kept signs later certificates, and the list of
    revoked ones. It belongs on no host of the job.
    """
    try:
        if revoke:
            _revoke(folder, revoke, hosts)
        else:
            _make(folder, _named(hosts or []), timedelta(days=days), keep_authority)
    except ImportError as error:
        command = install_command("pip install 'oneaccord-core[certs]'")
        raise UsageError(
            f"oneaccord certs needs the library cryptography, which cannot be imported ({error}); try: {command}"
        ) from None
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be read or written: {error.strerror}") from None


def _named(hosts: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of each host, from words such as ``node1=10.0.0.1,node1.example.org``."""
    named: dict[str, list[str]] = {}
    for word in hosts:
        host, equals, others = word.partition("=")
        names = [host, *(others.split(",") if equals else ())]
        for name in names:
            if name in ("", "..") or not _is_encodable(name):
                raise UsageError(f"{name!r} in {word!r} is no name of a host")
        if Path(host).name != host:
            raise UsageError(f"{host!r} is no name of a host: its certificate is to be written to a folder of that name")
        if host in named:
            raise UsageError(f"{host!r} was given twice: give its names in one word, such as {host}=NAME,NAME")
        named[host] = names
    return named


def _make(folder: Path, named: dict[str, list[str]], lifetime: timedelta, keep_authority: bool) -> None:
    if keep_authority and not named:
        raise UsageError(
            "--keep-authority needs the names of hosts: one certificate for all ranks cannot be revoked for one of them"
        )
    folders = {host: folder / host for host in named} if named else {_FOR_ALL: folder}
    for place in {folder, *folders.values()}:
        _check_place(place, is_empty=place != folder or not named)
    authority = _kept(folder) if named else None
    if authority is None and named and any(folder.glob("*/tls.crt")):
        raise UsageError(
            f"{folder} holds certificates of an authority whose key is not in {folder / _CA_KEY}, so that it signs no others: name another folder"
        )
    is_new = authority is None
    authority = authority or new_authority(lifetime)
    files = made(named or {_FOR_ALL: []}, lifetime, authority)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_place(folder, is_empty=not named)  # somebody may have put a link there meanwhile
    if keep_authority and is_new:
        _write(folder, {_CA_CRT: _pem(authority[0]), _CA_KEY: _key_pem(authority[1])})
    crl = folder / _CRL
    for host, place in folders.items():
        place.mkdir(mode=0o700, exist_ok=True)
        _check_place(place, is_empty=bool(named))
        _write(place, files[host])
        if named and crl.exists():
            _write(place, {_CRL: crl.read_bytes()})
    if named:
        print(f"made a certificate for {', '.join(folders)}; copy each one's folder, of {folder}, to its host, and set there:")
        print('\n[security]\ntls = "the/folder"')
    else:
        print(
            f'made a certificate for all ranks; give each host a copy of {folder}, and set there:\n\n[security]\ntls = "{folder}"'
        )
    print(f"\nvalid for {lifetime.days} days")
    if named and (folder / _CA_KEY).exists():
        print(f"{folder / _CA_KEY} signs more of them, and lists of revoked ones: keep it, and copy it to no host")


def _check_place(place: Path, is_empty: bool) -> None:
    """Refuse a folder where files of others stand, or where others could put theirs."""
    try:
        status = place.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"{place} is a link: name the folder itself")
    if not stat.S_ISDIR(status.st_mode) or (is_empty and any(place.iterdir())):
        raise UsageError(f"there is something in {place} already: name another folder, or remove it first")
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"other users can write to {place}, and replace what is written there: name a folder that does not exist yet"
        )


def _write(place: Path, files: Mapping[str, bytes]) -> None:
    """Write files that are new, and nobody else's to read."""
    for name, data in files.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(place / name, flags, 0o600), "wb") as file:
            file.write(data)


def _revoke(folder: Path, revoked: Sequence[str], hosts: list[str] | None) -> None:
    from cryptography import x509

    if hosts:
        raise UsageError(f"--revoke makes no certificates, and {hosts[0]!r} was given: make those by another command")
    authority = _kept(folder)
    if authority is None:
        raise UsageError(
            f"there is no {folder / _CA_KEY}, the authority's key, as --keep-authority writes it: without it, make all certificates anew"
        )
    certificates = [x509.load_pem_x509_certificate((folder / host / "tls.crt").read_bytes()) for host in revoked]
    crl = folder / _CRL
    data = revoking(authority, certificates, crl.read_bytes() if crl.exists() else b"")
    for place in (folder, *(path.parent for path in sorted(folder.glob("*/tls.crt")))):
        unfinished = place / f"{_CRL}.unfinished"
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
        _write(place, {unfinished.name: data})
        unfinished.replace(place / _CRL)  # a rank that reads it meanwhile finds a whole one
    print(
        f"revoked {', '.join(revoked)}; copy {crl} to the folder of each host: connections made from then on are refused to it"
    )


def _kept(folder: Path) -> Authority | None:
    """Return the authority whose key was kept in a folder."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key_pem, certificate_pem = (folder / _CA_KEY).read_bytes(), (folder / _CA_CRT).read_bytes()
    except FileNotFoundError:
        return None
    try:
        key = serialization.load_pem_private_key(key_pem, None)
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{folder / _CA_KEY} and {_CA_CRT} are no authority: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise UsageError(f"{folder / _CA_KEY} is not the key of {folder / _CA_CRT}")
    return certificate, key


def _is_encodable(host: str) -> bool:
    try:
        host.encode("idna")
    except UnicodeError:  # a part of it is empty, or has more than 63 characters
        return False
    return True


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host.encode("idna").decode())


def _pem(made: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return made.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _unsigned(subject: str, key: EllipticCurvePrivateKey, until: datetime) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    issuer, name = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])]) for text in (_AUTHORITY, subject))
    return x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number(), _now() - _SKEW, until)


def _now() -> datetime:
    return datetime.now(timezone.utc)  # noqa: UP017 - as cryptography writes it


def new_authority(lifetime: timedelta) -> Authority:
    """Return the certificate of a new authority, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    unsigned = _unsigned(_AUTHORITY, key, _now() + lifetime).add_extension(x509.BasicConstraints(True, 0), True)
    return unsigned.add_extension(signs, True).add_extension(identifier, False).sign(key, hashes.SHA256()), key


def made(named: Mapping[str, Sequence[str]], lifetime: timedelta, authority: Authority) -> dict[str, dict[str, bytes]]:
    """Make certificates of an authority.

    Parameters
    ----------
    named
        For each host its names and addresses, which its certificate names. A certificate without any is for all ranks.
    lifetime
        How long they are valid, and no longer than the authority.
    authority
        Its certificate and its key.

    Returns
    -------
    dict of str to dict of str to bytes
        For each host its files: names and contents.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    issuer, issuer_key = authority
    files = {}
    for host, names in named.items():
        key = ec.generate_private_key(ec.SECP256R1())
        unsigned = (
            _unsigned(host, key, min(_now() + lifetime, issuer.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(False, None), True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False)
        )
        if names:
            unsigned = unsigned.add_extension(x509.SubjectAlternativeName([*map(_alternative, names)]), False)
        certificate = unsigned.sign(issuer_key, hashes.SHA256())
        files[host] = {_CA_CRT: _pem(issuer), "tls.crt": _pem(certificate), "tls.key": _key_pem(key)}
    return files


def revoking(authority: Authority, certificates: Sequence[x509.Certificate], before: bytes = b"") -> bytes:
    """Return an authority's list of revoked certificates, valid as long as itself: these, and those of the list ``before``."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    issuer, key = authority
    revoked = list(x509.load_pem_x509_crl(before)) if before else []
    known = {entry.serial_number for entry in revoked}
    revoked += [
        x509.RevokedCertificateBuilder(each.serial_number, _now() - _SKEW).build()
        for each in certificates
        if each.serial_number not in known
    ]
    unsigned = (
        x509.CertificateRevocationListBuilder(issuer.subject, _now() - _SKEW, issuer.not_valid_after_utc, [], revoked)
        .add_extension(x509.CRLNumber(len(revoked)), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
    )
    return _pem(unsigned.sign(key, hashes.SHA256()))
