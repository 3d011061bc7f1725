"""How agents prove to each other that they belong to the cluster: TLS 1.3 with both sides authenticated.

A certificate names the cluster and the agent by a URI: `kvpeer://<cluster>/agent/<id of the run, hex>` or, for
certificates that outlive a run, `kvpeer://<cluster>/name/<name of the agent>`. After the handshake the certificate must
agree with what the peer says in its hello; `Security.check` is where that happens.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpeer.agent.certificates import Authority, uris_of
from kvpeer.agent.config import AgentConfig
from kvpeer.agent.config.checks import parse_secret
from kvpeer.agent.private_files import ANYBODY, NOT_OTHERS, generated_secret, read_private
from kvpeer.agent.told_policy import policy_key
from kvpeer.model import AgentId, ConfigError, RemoteProtocolError
from kvpeer.wire.messages import AgentInfo

__all__ = ["PeerRejectedError", "Security", "agent_uri", "name_uri", "open_security"]

_SIDES = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)


class PeerRejectedError(RemoteProtocolError):
    """The peer is not who it has to be. `reason` is a label of the refusal counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Security:
    """What both ends of the control channel need. The contexts are None in insecure mode. `role`: agents link with
    agents and doctors with doctors, so that no agent takes a doctor for a member; empty for agents. `policy_key`: what
    documents of the operator are signed with; empty where there is no secret."""

    cluster: str
    server_context: ssl.SSLContext | None
    client_context: ssl.SSLContext | None
    role: str = ""
    policy_key: bytes = b""

    @property
    def said_cluster(self) -> str:
        """What this side says in its hello, and wants to hear."""
        return f"{self.cluster}/{self.role}" if self.role else self.cluster

    def check(self, certificate: Mapping[str, Any] | None, cluster: str, info: AgentInfo) -> None:
        """Returns when what a peer says of itself in its hello agrees with its certificate (as `SSLObject.getpeercert`
        gives it).

        Raises:
            PeerRejectedError: it says or proves another cluster (reason "cluster"), or another agent ("identity").
        """
        if cluster != self.said_cluster:
            raise PeerRejectedError("cluster", f"it is of cluster {cluster!r}, not of {self.said_cluster!r}")
        cluster = self.cluster
        if self.server_context is None:
            return
        uris = _uris(certificate)
        if agent_uri(cluster, AgentId(info.agent_id)) in uris or name_uri(cluster, info.name) in uris:
            return
        if not any(uri.startswith(f"kvpeer://{cluster}/") for uri in uris):
            raise PeerRejectedError("cluster", f"its certificate does not name cluster {cluster!r} but {sorted(uris)}")
        said = f"agent {info.agent_id.hex()} named {info.name!r}"
        raise PeerRejectedError("identity", f"it says it is {said}, its certificate says {sorted(uris)}")


def agent_uri(cluster: str, agent_id: AgentId) -> str:
    """How a certificate names one run of an agent."""
    return f"kvpeer://{cluster}/agent/{agent_id.hex()}"


def name_uri(cluster: str, name: str) -> str:
    """How a certificate names an agent whatever its run."""
    return f"kvpeer://{cluster}/name/{name}"


def open_security(config: AgentConfig, agent_id: AgentId) -> Security:
    """The security of this run. Reads the files of the configured mode; may generate the user's secret.

    Raises:
        ConfigError: a file is missing, unusable or reachable by others, or a certificate does not name this agent.
    """
    cluster = config.agent.cluster
    mode = config.security.mode
    if mode == "insecure":
        return Security(cluster, None, None, policy_key=policy_key(b"", cluster))
    if mode == "mutual_tls":
        return _from_files(config)
    secret = _secret(config)
    authority = Authority(secret, cluster)
    pem = authority.leaf_pem(agent_uri(cluster, agent_id), config.agent.host)
    ca_pem = authority.certificate_pem.decode()
    with _in_memory(pem) as path:
        server, client = (_context(side, ca_pem, path, path) for side in _SIDES)
    return Security(cluster, server, client, policy_key=policy_key(secret, cluster))


def _secret(config: AgentConfig) -> bytes:
    security = config.security
    if security.secret:
        return parse_secret(security.secret, "security.secret")
    if security.secret_file:
        text = read_private(Path(security.secret_file), NOT_OTHERS).decode("ascii", "replace")
        return parse_secret(text, f"security.secret_file ({security.secret_file})")
    folder = Path(config.agent.runtime_dir)
    return parse_secret(generated_secret(folder), f"the generated secret in {folder}")


def _from_files(config: AgentConfig) -> Security:
    files = config.security
    ca_pem = read_private(Path(files.ca_file), ANYBODY).decode("ascii", "replace")
    cert_pem = read_private(Path(files.cert_file), ANYBODY)
    read_private(Path(files.key_file), NOT_OTHERS)
    try:
        uris = uris_of(cert_pem)
        server, client = (_context(side, ca_pem, files.cert_file, files.key_file) for side in _SIDES)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"security.cert_file, key_file and ca_file cannot be used together: {error}") from error
    needed = name_uri(config.agent.cluster, config.agent.name)
    if needed not in uris:
        raise ConfigError(f"the certificate in security.cert_file needs the URI {needed} (it has {sorted(uris)})")
    return Security(config.agent.cluster, server, client)


def _context(side: int, ca_pem: str, cert_path: str, key_path: str) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # an agent is named by its URI, not by its address
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca_pem)
    context.load_cert_chain(cert_path, key_path)
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection proves itself anew
    return context


@contextlib.contextmanager
def _in_memory(pem: bytes) -> Iterator[str]:
    """A path to these bytes that no file system holds and no other user can open: `ssl` takes keys from paths only."""
    fd = os.memfd_create("kvpeer-leaf", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as stream:
            stream.write(pem)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _uris(certificate: Mapping[str, Any] | None) -> Collection[str]:
    names = (certificate or {}).get("subjectAltName", ())
    return {str(value) for kind, value in names if kind == "URI"}
