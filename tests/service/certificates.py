"""Makes a certificate authority and certificates signed by it, for one test run."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_authority(folder: Path, name: str = "ca", *, days: int = 1) -> dict[str, str]:
    """Write files: ``ca``, and certificate and key of a node (for 127.0.0.1 and localhost) and of a loader.

    The certificates end in this number of days.
    """
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate(name, authority_key, name, authority_key, authority=True)
    files = {"ca": _write(folder / f"{name}.pem", _pem(authority))}
    for who in ("node", "loader"):
        key = ec.generate_private_key(ec.SECP256R1())
        made = _certificate(who, key, name, authority_key, authority=False, days=days)
        files[f"{who}_cert"] = _write(folder / f"{name}-{who}.pem", _pem(made))
        plain = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        files[f"{who}_key"] = _write(folder / f"{name}-{who}.key", plain)
    return files


def _certificate(
    subject: str, key: Any, issuer: str, issuer_key: Any, *, authority: bool, days: int = 1
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(subject))
        .issuer_name(_named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=2))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if authority:
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
    else:
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(made: x509.Certificate) -> bytes:
    return made.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)
