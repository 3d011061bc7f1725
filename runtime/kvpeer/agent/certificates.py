"""Certificates that follow from a secret: the cluster's authority and each run's leaf.

The authority's Ed25519 key is HKDF-SHA256 of the secret and the cluster's name, and Ed25519 signatures are
deterministic, so every agent that knows the secret derives the same authority certificate, byte for byte, and none has
to be distributed. Each run makes a key of its own that never leaves the process, and signs a leaf for it.
"""

from __future__ import annotations

import datetime
import ipaddress

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["Authority", "uris_of"]

_SALT = b"kvpeer authority 1"
_SERIAL = 1

# Fixed, so that the certificate is deterministic. The leaves have it too: whoever has the secret can sign a new one at
# any time, so an early end would protect nothing and break long runs and hosts with a wrong clock.
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
_NOT_AFTER = datetime.datetime(2120, 1, 1, tzinfo=datetime.timezone.utc)

_KEY_BYTES = 32


class Authority:
    """The certificate authority of one cluster under one secret."""

    def __init__(self, secret: bytes, cluster: str) -> None:
        derivation = HKDF(algorithm=hashes.SHA256(), length=_KEY_BYTES, salt=_SALT, info=cluster.encode())
        self._key = Ed25519PrivateKey.from_private_bytes(derivation.derive(secret))
        self._name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "kvpeer"), _common_name(cluster)])
        self._certificate = self._sign_self()

    @property
    def certificate_pem(self) -> bytes:
        """The authority's certificate."""
        return self._certificate.public_bytes(Encoding.PEM)

    def leaf_pem(self, uri: str, host: str) -> bytes:
        """A new private key and its certificate, in this order, for an agent with this URI and numeric address. The key
        exists only in the returned bytes."""
        key = Ed25519PrivateKey.generate()
        names = [x509.UniformResourceIdentifier(uri), x509.IPAddress(ipaddress.ip_address(host))]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            self._builder(key.public_key())
            .subject_name(x509.Name([_common_name("agent")]))
            .serial_number(x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        certificate = builder.sign(self._key, algorithm=None)
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return key_pem + certificate.public_bytes(Encoding.PEM)

    def _sign_self(self) -> x509.Certificate:
        builder = (
            self._builder(self._key.public_key())
            .subject_name(self._name)
            .serial_number(_SERIAL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(key_cert_sign=True), critical=True)
        )
        return builder.sign(self._key, algorithm=None)

    def _builder(self, public_key: Ed25519PublicKey) -> x509.CertificateBuilder:
        own_key = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .issuer_name(self._name)
            .public_key(public_key)
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own_key), critical=False)
        )


def uris_of(certificate_pem: bytes) -> set[str]:
    """The URIs that the first certificate of a PEM file is for.

    Raises:
        ValueError: there is no certificate in it, or none that can be read.
    """
    try:
        names = x509.load_pem_x509_certificate(certificate_pem).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return set()
    except _UNREADABLE as error:
        raise ValueError(f"the certificate cannot be read: {error}") from error
    return set(names.value.get_values_for_type(x509.UniformResourceIdentifier))


_UNREADABLE = (x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm)
"""What the library raises for certificates, beside ValueError, that is none."""


def _common_name(text: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(NameOID.COMMON_NAME, text)


def _key_usage(digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
