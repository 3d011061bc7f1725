"""The webhook's certificate: believed by who trusts the bundle, renewed in time, never by surprise."""

from __future__ import annotations

import base64
import datetime
import ssl
from pathlib import Path

import pytest
from kvpeer_operator.serving import LIFE, RENEW_BEFORE, ca_bundle, decoded, is_due, issue, webhook_hosts

NOW = datetime.datetime(2026, 6, 1, tzinfo=datetime.timezone.utc)
HOSTS = webhook_hosts("kvpeer-webhook", "kvpeer-system")
DAY = datetime.timedelta(days=1)


@pytest.mark.parametrize(
    ("now", "hosts", "due"),
    [
        (NOW, HOSTS, False),
        (NOW + LIFE - RENEW_BEFORE - DAY, HOSTS, False),
        (NOW + LIFE - RENEW_BEFORE, HOSTS, True),
        (NOW + 2 * LIFE, HOSTS, True),  # nobody ran for a year
        (NOW - DAY, HOSTS, True),  # the clock was put back: API servers would refuse it
        (NOW, webhook_hosts("other", "kvpeer-system"), True),
    ],
)
def test_a_certificate_is_renewed_when_it_is_due(now: datetime.datetime, hosts: list[str], due: bool) -> None:
    assert is_due(issue(HOSTS, NOW, None), hosts, now) is due


@pytest.mark.parametrize("data", [None, {}, {"tls.crt": "?"}, {"tls.crt": "", "tls.key": "", "ca.crt": ""}])
def test_an_empty_or_broken_secret_is_due(data: dict[str, str] | None) -> None:
    assert is_due(decoded(data), HOSTS, NOW)


def test_a_certificate_survives_its_secret() -> None:
    serving = issue(HOSTS, NOW, None)
    assert decoded(serving.encoded()) == serving


def test_the_api_server_believes_the_new_and_the_previous_certificate(tmp_path: Path) -> None:
    """Two real ends of TLS: replicas renew one after the other, the bundle is written once."""
    now = datetime.datetime.now(datetime.timezone.utc)
    first = issue(HOSTS, now, None)
    second = issue(HOSTS, now, first)
    bundle = base64.b64decode(ca_bundle(second)).decode()
    for serving in (first, second):
        assert _handshake(bundle, serving.certificate + serving.key, HOSTS[0], tmp_path)
    stranger = issue(HOSTS, now, None)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(bundle, stranger.certificate + stranger.key, HOSTS[0], tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(bundle, second.certificate + second.key, "elsewhere.svc", tmp_path)


def _handshake(bundle: str, chain: str, host: str, folder: Path) -> bool:
    (folder / "chain.pem").write_text(chain)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(folder / "chain.pem")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=bundle).wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(6):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.version() is not None
