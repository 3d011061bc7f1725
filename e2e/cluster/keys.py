"""The cluster's authority, its certificates and kubeconfigs; new ones each time the cluster comes up."""

from __future__ import annotations

import datetime
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cluster.addresses import API_ADDRESS, API_SERVICE_ADDRESS, API_URL, node_address, node_name
from cluster.folders import state_folder

__all__ = ["ADMIN", "key_file", "kubeconfig", "make_keys"]

LIFE = datetime.timedelta(days=30)
SKEW = datetime.timedelta(hours=1)
ADMIN = "admin"

_USERS = {
    ADMIN: ("admin", ["system:masters"]),
    "apiserver-kubelet": ("apiserver-kubelet", ["system:masters"]),
    "controller-manager": ("system:kube-controller-manager", []),
    "scheduler": ("system:kube-scheduler", []),
    "proxy": ("system:kube-proxy", []),
    "coredns": ("coredns", ["system:masters"]),
}
_API_NAMES = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]


def key_file(name: str) -> Path:
    """A certificate, key or public key: `ca.crt`, `n1.key`, ..."""
    return state_folder() / "keys" / name


def kubeconfig(user: str = ADMIN) -> Path:
    """The kubeconfig of a user of the cluster, or of a node."""
    return state_folder() / f"{user}.kubeconfig"


def make_keys(n_nodes: int) -> None:
    """Writes all of them. Kubelets serve with certificates of the same authority."""
    key_file("").mkdir(parents=True, exist_ok=True)
    authority = _Authority()
    authority.issue("apiserver", "kube-apiserver", hosts=[API_ADDRESS, API_SERVICE_ADDRESS, "127.0.0.1", *_API_NAMES])
    users = dict(_USERS)
    for number in range(1, n_nodes + 1):
        name = node_name(number)
        users[name] = (f"system:node:{name}", ["system:nodes"])
        authority.issue(f"{name}-serving", name, hosts=[node_address(number), name, "127.0.0.1"])
    for file, (user, groups) in users.items():
        authority.issue(file, user, groups)
        kubeconfig(file).write_text(json.dumps(_kubeconfig(file), indent=1))
    accounts = rsa.generate_private_key(65537, 2048)
    _write_key("accounts.key", accounts)
    public = accounts.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    key_file("accounts.pub").write_bytes(public)


class _Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("kvpeer-cluster")
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(self._name, self._key.public_key()).add_extension(constraints, critical=True)
        _write_key("ca.key", self._key)
        self._sign("ca", builder)

    def issue(self, file: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = self._builder(_name(user, groups), key.public_key()).add_extension(usage, critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_host(each) for each in hosts])
            builder = builder.add_extension(names, critical=False)
        _write_key(f"{file}.key", key)
        self._sign(file, builder)

    def _builder(self, subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + LIFE)
        )

    def _sign(self, file: str, builder: x509.CertificateBuilder) -> None:
        certificate = builder.sign(self._key, hashes.SHA256())
        key_file(f"{file}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))


def _name(common: str, organizations: Sequence[str] = ()) -> x509.Name:
    """A user's name and groups, as Kubernetes reads them from a certificate."""
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, each) for each in organizations]
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(file: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    path = key_file(file)
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))


def _kubeconfig(user: str) -> dict[str, object]:
    cluster = {"server": API_URL, "certificate-authority": str(key_file("ca.crt"))}
    keys = {"client-certificate": str(key_file(f"{user}.crt")), "client-key": str(key_file(f"{user}.key"))}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "kvpeer",
        "clusters": [{"name": "kvpeer", "cluster": cluster}],
        "users": [{"name": user, "user": keys}],
        "contexts": [{"name": "kvpeer", "context": {"cluster": "kvpeer", "user": user}}],
    }
