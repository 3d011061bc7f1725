"""The webhook's serving certificate: when a new one is due, and making it.

An authority is made with each certificate, signs it and is thrown away. The webhook configuration trusts the new and
the previous authority, so that a replica which still serves the previous certificate is believed.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["LIFE", "RENEW_BEFORE", "Serving", "ca_bundle", "decoded", "expires_at", "is_due", "issue", "webhook_hosts"]

LIFE = datetime.timedelta(days=365)
RENEW_BEFORE = datetime.timedelta(days=120)
"""A third of the life: an operator that was off for a season comes back in time."""
_SKEW = datetime.timedelta(hours=1)
"""Clocks of API servers may be behind."""

CERTIFICATE, KEY, AUTHORITY, PREVIOUS = "tls.crt", "tls.key", "ca.crt", "previous-ca.crt"


@dataclass(frozen=True, slots=True)
class Serving:
    """PEM texts, as they stand in the Secret."""

    certificate: str
    key: str
    authority: str
    previous: str = ""

    def encoded(self) -> dict[str, str]:
        """The Secret's data."""
        texts = {CERTIFICATE: self.certificate, KEY: self.key, AUTHORITY: self.authority, PREVIOUS: self.previous}
        return {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}


def webhook_hosts(service: str, namespace: str) -> list[str]:
    """Names by which the API server calls the webhook's Service."""
    return [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"]


def decoded(data: Mapping[str, str] | None) -> Serving | None:
    """What a Secret's data holds; None: no certificate, or nothing that can be read."""
    try:
        texts = {name: base64.b64decode(value, validate=True).decode() for name, value in (data or {}).items()}
        return Serving(texts[CERTIFICATE], texts[KEY], texts[AUTHORITY], texts.get(PREVIOUS, ""))
    except (KeyError, ValueError):
        return None


def is_due(serving: Serving | None, hosts: list[str], now: datetime.datetime) -> bool:
    """Whether a new certificate has to be made: there is none that can be read, it is for other names, it ends soon, or
    it begins later (the clock was put back)."""
    if serving is None:
        return True
    try:
        certificate = x509.load_pem_x509_certificate(serving.certificate.encode())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return True
    is_young = certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc - RENEW_BEFORE
    return not is_young or set(names.get_values_for_type(x509.DNSName)) != set(hosts)


def expires_at(serving: Serving) -> float:
    """End of the certificate's life, in seconds since the epoch. Raises ValueError for one that cannot be read."""
    return x509.load_pem_x509_certificate(serving.certificate.encode()).not_valid_after_utc.timestamp()


def issue(hosts: list[str], now: datetime.datetime, previous: Serving | None) -> Serving:
    """A new certificate for these names, valid from an hour ago for LIFE."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    # Of two authorities of one name in a bundle, some verifiers try the first alone.
    issuer_name = f"kvpeer authority {x509.random_serial_number():x}"
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer_name)])
    authority = (
        _builder(issuer, issuer, authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvpeer-operator")])
    certificate = (
        _builder(issuer, subject, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Serving(
        certificate=certificate.public_bytes(Encoding.PEM).decode(),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        authority=authority.public_bytes(Encoding.PEM).decode(),
        previous=previous.authority if previous else "",
    )


def ca_bundle(serving: Serving) -> str:
    """What the webhook configuration trusts, as it is written there."""
    return base64.b64encode((serving.authority + serving.previous).encode()).decode()


def _builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + LIFE)
    )
