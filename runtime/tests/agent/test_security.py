"""Identity: what follows from a secret, real handshakes over a socket pair, and files that others could reach."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from kvpeer.agent.certificates import Authority, uris_of
from kvpeer.agent.config import AgentConfig, load
from kvpeer.agent.private_files import NOT_OTHERS, OWNER_ONLY, generated_secret, private_folder, read_private
from kvpeer.agent.security import PeerRejectedError, Security, agent_uri, name_uri, open_security
from kvpeer.agent.told_policy import policy_key
from kvpeer.model import AgentId, ConfigError
from kvpeer.wire.messages import AgentInfo

SECRET = "ab" * 32
ID_A = AgentId(bytes(range(16)))
ID_B = AgentId(bytes(range(16, 32)))


def config_of(secret: str = SECRET, cluster: str = "c", **env: str) -> AgentConfig:
    return load(None, {"KVPEER_SECURITY_SECRET": secret, "KVPEER_AGENT_CLUSTER": cluster, **env})


def info(agent_id: AgentId, name: str = "n") -> AgentInfo:
    return AgentInfo(agent_id, name, "127.0.0.1", 1, 2)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[dict, dict, str]:
    """Certificates that server and client saw, and the TLS version. One byte crosses, so that a late rejection
    shows."""
    left, right = socket.socketpair()
    left.settimeout(10)
    right.settimeout(10)

    def serve() -> tuple[dict, str]:
        with left, server.wrap_socket(left, server_side=True) as tls:
            tls.sendall(b"x")
            return tls.getpeercert(), tls.version()

    with ThreadPoolExecutor(1) as pool, right:
        served = pool.submit(serve)
        with client.wrap_socket(right) as tls:
            if tls.recv(1) != b"x":
                raise ssl.SSLError("closed")
            seen = tls.getpeercert()
        certificate, version = served.result(10)
        return certificate, seen, version


def test_every_agent_derives_the_same_authority_from_secret_and_cluster() -> None:
    first = Authority(b"s" * 32, "c").certificate_pem
    assert Authority(b"s" * 32, "c").certificate_pem == first
    assert Authority(b"s" * 32, "d").certificate_pem != first
    assert Authority(b"t" * 32, "c").certificate_pem != first


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        pytest.param(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x42", id="a version that there is not"),
        pytest.param(b"\x06\x03U\x1d\x0e", b"\x06\x03U\x1d\x23", id="an extension twice"),
    ],
)
def test_a_certificate_that_cannot_be_read_is_one_kind_of_error(written: bytes, instead: bytes) -> None:
    pem = Authority(b"s" * 32, "c").leaf_pem(agent_uri("c", ID_A), "10.1.2.3")
    der = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    assert written in der
    broken = base64.encodebytes(der.replace(written, instead, 1))
    with pytest.raises(ValueError, match="certificate cannot be read"):
        uris_of(b"-----BEGIN CERTIFICATE-----\n" + broken + b"-----END CERTIFICATE-----\n")


def test_a_leaf_names_agent_and_address_and_every_run_has_its_own_key() -> None:
    authority = Authority(b"s" * 32, "c")
    first, second = (authority.leaf_pem(agent_uri("c", ID_A), "10.1.2.3") for _ in range(2))
    assert uris_of(first) == {"kvpeer://c/agent/000102030405060708090a0b0c0d0e0f"}
    certificate = x509.load_pem_x509_certificate(first)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3"]
    assert certificate.public_key() != x509.load_pem_x509_certificate(second).public_key()


def test_two_agents_of_one_secret_prove_themselves_to_each_other_over_tls_1_3() -> None:
    a, b = open_security(config_of(), ID_A), open_security(config_of(), ID_B)
    seen_by_server, seen_by_client, version = handshake(a.server_context, b.client_context)
    assert version == "TLSv1.3"
    a.check(seen_by_server, "c", info(ID_B))
    b.check(seen_by_client, "c", info(ID_A))


@pytest.mark.skipif(sys.version_info < (3, 13), reason="older OpenSSL flags")
def test_certificates_pass_strict_verification() -> None:
    a, b = open_security(config_of(), ID_A), open_security(config_of(), ID_B)
    b.client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    handshake(a.server_context, b.client_context)


@pytest.mark.parametrize("foreign", [{"secret": "cd" * 32}, {"cluster": "d"}], ids=["secret", "cluster"])
def test_another_secret_or_cluster_fails_the_handshake_in_both_directions(foreign: dict[str, str]) -> None:
    own, other = open_security(config_of(), ID_A), open_security(config_of(**foreign), ID_B)
    for server, client in ((own, other), (other, own)):
        with pytest.raises((ssl.SSLError, OSError)):
            handshake(server.server_context, client.client_context)


def test_a_client_without_a_certificate_is_not_served() -> None:
    server = open_security(config_of(), ID_A)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(server.server_context, bare)


def test_tls_1_2_is_not_spoken() -> None:
    a, b = open_security(config_of(), ID_A), open_security(config_of(), ID_B)
    b.client_context.minimum_version = ssl.TLSVersion.TLSv1_2
    b.client_context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(a.server_context, b.client_context)


def certificate_with(*uris: str) -> dict[str, object]:
    return {"subjectAltName": (*(("URI", uri) for uri in uris), ("IP Address", "127.0.0.1"))}


@pytest.mark.parametrize(
    ("certificate", "cluster", "reason"),
    [
        (certificate_with(agent_uri("c", ID_A)), "d", "cluster"),
        (certificate_with(agent_uri("d", ID_A)), "c", "cluster"),
        (certificate_with(), "c", "cluster"),
        ({}, "c", "cluster"),
        (None, "c", "cluster"),
        (certificate_with(agent_uri("c", ID_B)), "c", "identity"),
        (certificate_with(name_uri("c", "other")), "c", "identity"),
        (certificate_with(agent_uri("c", ID_A) + "0"), "c", "identity"),
    ],
)
def test_a_hello_that_the_certificate_does_not_support_is_rejected(
    certificate: dict, cluster: str, reason: str
) -> None:
    security = open_security(config_of(), ID_B)
    with pytest.raises(PeerRejectedError) as caught:
        security.check(certificate, cluster, info(ID_A))
    assert caught.value.reason == reason


def test_a_certificate_may_name_the_run_or_the_name() -> None:
    security = open_security(config_of(), ID_B)
    security.check(certificate_with(agent_uri("c", ID_A)), "c", info(ID_A, "any"))
    security.check(certificate_with("kvpeer://x/agent/0", name_uri("c", "n")), "c", info(ID_A, "n"))


def test_insecure_must_be_typed_out_and_still_checks_the_cluster() -> None:
    security = open_security(load(None, {"KVPEER_SECURITY_MODE": "insecure", "KVPEER_AGENT_CLUSTER": "c"}), ID_A)
    assert security == Security("c", None, None, policy_key=policy_key(b"", "c"))
    security.check(None, "c", info(ID_B))
    with pytest.raises(PeerRejectedError, match="cluster 'd'"):
        security.check(None, "d", info(ID_B))


WATCHED = """
import os, sys
from kvpeer.agent.config import load
from kvpeer.agent.security import open_security

written = []

def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR |
    os.O_CREAT):
        written.append(arguments[0])

config = load(None, {"KVPEER_SECURITY_SECRET": "ab" * 32})
sys.addaudithook(watch)
open_security(config, bytes(16))
print(written)
"""


def test_the_private_key_is_never_in_a_file_system() -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-B", "-c", WATCHED]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True, text=True)
    assert done.stdout.strip() == "[]"
    before = set(os.listdir("/proc/self/fd"))
    open_security(config_of(), ID_A)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_users_secret_is_generated_once_for_all_processes(tmp_path: Path) -> None:
    folder = tmp_path / "kvpeer"
    barrier = threading.Barrier(8)

    def ask(_: int) -> str:
        barrier.wait(10)
        return generated_secret(folder)

    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(ask, range(8)))
    assert len(secrets) == 1
    assert len(secrets.pop().strip()) == 64
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["secret"]


def test_without_any_secret_agents_of_one_user_share_the_generated_one(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    a, b = (open_security(load(None, env), agent_id) for agent_id in (ID_A, ID_B))
    handshake(a.server_context, b.client_context)


def test_a_folder_or_secret_that_others_can_reach_is_refused(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    open_folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"others may enter .* chmod 700"):
        generated_secret(open_folder)
    folder = private_folder(tmp_path / "own")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="is not a folder"):
        private_folder(tmp_path / "link")
    generated_secret(folder)
    (folder / "secret").chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        generated_secret(folder)
    assert read_private(folder / "secret", NOT_OTHERS)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_folder_or_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "own")
    generated_secret(folder)
    os.chown(folder / "secret", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_private(folder / "secret", OWNER_ONLY)
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        private_folder(folder)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"ab" * 15, "has 120 bits"), (b"hunter2", "hexadecimal"), (b"\xff" * 40, "hexadecimal"), (b"", "hexadecimal")],
)
def test_a_secret_file_that_is_too_weak_is_refused_without_showing_it(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content + b"\n")
    file.chmod(0o400)
    with pytest.raises(ConfigError, match=fault) as caught:
        open_security(load(None, {"KVPEER_SECURITY_SECRET_FILE": str(file)}), ID_A)
    assert not content or content.decode("ascii", "replace") not in str(caught.value)


def test_a_secret_file_that_others_can_read_or_that_is_missing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        open_security(load(None, {"KVPEER_SECURITY_SECRET_FILE": str(file)}), ID_A)
    file.write_text(SECRET)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"others may read or write .* chmod o-rwx"):
        open_security(load(None, {"KVPEER_SECURITY_SECRET_FILE": str(file)}), ID_A)


def mutual_tls(tmp_path: Path, uri: str, name: str) -> AgentConfig:
    authority = Authority(b"f" * 32, "from files")
    (tmp_path / "ca.pem").write_bytes(authority.certificate_pem)
    pem = authority.leaf_pem(uri, "127.0.0.1")
    split = pem.index(b"-----BEGIN CERTIFICATE")
    (tmp_path / "key.pem").write_bytes(pem[:split])
    (tmp_path / "cert.pem").write_bytes(pem[split:])
    (tmp_path / "key.pem").chmod(0o600)
    env = {f"KVPEER_SECURITY_{part.upper()}_FILE": str(tmp_path / f"{part}.pem") for part in ("ca", "cert", "key")}
    return load(
        None, {**env, "KVPEER_SECURITY_MODE": "mutual_tls", "KVPEER_AGENT_CLUSTER": "c", "KVPEER_AGENT_NAME": name}
    )


def test_certificates_from_files_name_the_agent(tmp_path: Path) -> None:
    security = open_security(mutual_tls(tmp_path, name_uri("c", "pod-0"), "pod-0"), ID_A)
    certificate, _, _ = handshake(security.server_context, security.client_context)
    security.check(certificate, "c", info(ID_B, "pod-0"))
    with pytest.raises(PeerRejectedError):
        security.check(certificate, "c", info(ID_B, "pod-1"))


def test_files_that_do_not_fit_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs the URI kvpeer://c/name/pod-1 \(it has \['kvpeer://c/name/pod-0'\]\)"
    ):
        open_security(mutual_tls(tmp_path, name_uri("c", "pod-0"), "pod-1"), ID_A)
    config = mutual_tls(tmp_path, name_uri("c", "pod-0"), "pod-0")
    (tmp_path / "key.pem").chmod(0o604)
    with pytest.raises(ConfigError, match=r"key\.pem \(mode 0604\)"):
        open_security(config, ID_A)
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "key.pem").write_bytes(b"no key")
    with pytest.raises(ConfigError, match="cannot be used together"):
        open_security(config, ID_A)
    (tmp_path / "cert.pem").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*cert\.pem"):
        open_security(config, ID_A)
