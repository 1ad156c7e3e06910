"""``manyhands certs``: certificates for the ranks of a job."""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.common.installing import install_command
from manyhands.errors import UsageError

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["certs", "made"]

_AUTHORITY = "authority of a job of manyhands"
_SKEW = timedelta(hours=1)
"""How far the clocks of hosts may differ."""


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are written; made if need be.", show_default=False)],
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST]...", help="One certificate for each, in DIR/HOST; without, one in DIR for all ranks."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36500, help="How long they are valid.")] = 365,
) -> None:
    """Make certificates by which the ranks of a job encrypt their connections (security.tls).

    Makes an authority, and certificates of it: ca.crt, tls.crt and tls.key. The key of the authority is not kept, so that nobody can add a
    certificate later: to replace one, make all of them anew. Keep each tls.key as you keep the secret.
    """
    folders = {host: folder / host for host in hosts} if hosts else {"manyhands": folder}
    for host, place in folders.items():
        if hosts and (Path(host).name != host or host in ("", "..") or not _is_encodable(host)):
            raise UsageError(f"{host!r} is no name of a host: its certificate is to be written to a folder of that name")
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise UsageError(f"there is something in {place} already: name another folder, or remove it first")
    try:
        files = made(list(folders), timedelta(days=days))
    except ImportError as error:
        command = install_command("pip install 'manyhands-core[certs]'")
        raise UsageError(
            f"manyhands certs needs the library cryptography, which cannot be imported ({error}); try: {command}"
        ) from None
    try:
        for host, place in folders.items():
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, data in files[host].items():
                path = place / name
                path.touch(mode=0o600)
                path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    if hosts:
        print(f"made {len(folders)} certificates; copy each folder of {folder} to its host, and set there:")
        print('\n[security]\ntls = "the/folder"')
    else:
        print(
            f'made a certificate for all ranks; give each host a copy of {folder}, and set there:\n\n[security]\ntls = "{folder}"'
        )
    print(f"\nvalid for {days} days")


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


def made(hosts: list[str], lifetime: timedelta) -> dict[str, dict[str, bytes]]:
    """Make an authority and certificates of it, for these hosts.

    Returns
    -------
    dict of str to dict of str to bytes
        For each host its files: names and contents.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.now(timezone.utc)  # noqa: UP017 - as cryptography writes it

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])

    def unsigned(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(name(_AUTHORITY), name(subject), key.public_key(), x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + lifetime)
        )

    authority = ec.generate_private_key(ec.SECP256R1())
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = unsigned(_AUTHORITY, authority).add_extension(x509.BasicConstraints(True, 0), True).add_extension(signs, True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    ca_crt = ca.add_extension(identifier, False).sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    files = {}
    for host in hosts:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            unsigned(host, key)
            .add_extension(x509.BasicConstraints(False, None), True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False)
            .add_extension(x509.SubjectAlternativeName([_alternative(host)]), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False)
            .sign(authority, hashes.SHA256())
        )
        files[host] = {
            "ca.crt": ca_crt,
            "tls.crt": certificate.public_bytes(serialization.Encoding.PEM),
            "tls.key": key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        }
    return files
