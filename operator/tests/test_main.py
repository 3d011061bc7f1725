"""The operator starts, and its webhook's certificate is made, shared by replicas and trusted."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import stat
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kopf
import pytest
from kvpeer_operator import main
from kvpeer_operator.serving import decoded
from store import Store

SECRET = {"kind": "Secret", "metadata": {"name": "kvpeer-webhook-certificate", "namespace": "kvpeer-system"}}
HOOK = {
    "kind": "MutatingWebhookConfiguration",
    "metadata": {"name": "kvpeer-injection"},
    "webhooks": [{"name": "injection.kvpeer.io", "clientConfig": {"service": {}}}],
}


class Cluster(Store):
    """With objects that are replaced only by who saw the latest version. `rival` is written just before the first
    replacement, as by a replica that was faster."""

    def __init__(self, *objects: Mapping[str, Any], rival: Mapping[str, str] | None = None) -> None:
        super().__init__(*objects)
        self.rival = rival

    def replace(self, obj: Mapping[str, Any]) -> bool:
        there = self.objects[obj["kind"], obj["metadata"]["name"]]
        if self.rival is not None:
            there["data"], self.rival = dict(self.rival), None
            return False
        there.update(obj)
        self.writes.append(f"replace {obj['kind']}")
        return True

    @property
    def secret(self) -> dict[str, Any]:
        return self.objects["Secret", "kvpeer-webhook-certificate"]

    @property
    def bundle(self) -> str:
        (hook,) = self.objects["MutatingWebhookConfiguration", "kvpeer-injection"]["webhooks"]
        return base64.b64decode(hook["clientConfig"]["caBundle"]).decode()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPEER_OPERATOR_NAMESPACE", "kvpeer-system")
    monkeypatch.setenv("KVPEER_OPERATOR_RELEASE", "kvpeer")
    monkeypatch.setenv("KVPEER_OPERATOR_CERTIFICATE_DIR", str(tmp_path))


def test_the_first_replica_makes_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    cluster = Cluster(SECRET, HOOK)
    main._refresh_certificate(cluster, tmp_path)  # type: ignore[arg-type]
    made = decoded(cluster.secret["data"])
    assert made is not None
    assert (tmp_path / "tls.crt").read_text() == made.certificate
    assert (tmp_path / "tls.key").read_text() == made.key
    assert stat.S_IMODE((tmp_path / "tls.key").stat().st_mode) == 0o600
    assert cluster.bundle == made.authority


def test_replicas_serve_the_same_certificate_and_then_write_nothing(tmp_path: Path) -> None:
    cluster = Cluster(SECRET, HOOK)
    main._refresh_certificate(cluster, tmp_path)  # type: ignore[arg-type]
    first = (tmp_path / "tls.crt").read_text()
    cluster.writes.clear()
    main._refresh_certificate(cluster, tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / "tls.crt").read_text() == first
    assert cluster.writes == []


def test_who_was_slower_takes_the_certificate_of_who_was_faster(tmp_path: Path) -> None:
    faster = Cluster(SECRET, HOOK)
    main._refresh_certificate(faster, tmp_path)  # type: ignore[arg-type]
    slower = Cluster(SECRET, HOOK, rival=faster.secret["data"])
    main._refresh_certificate(slower, tmp_path)  # type: ignore[arg-type]
    assert slower.secret["data"] == faster.secret["data"]
    assert slower.bundle == faster.bundle


def test_without_the_charts_secret_the_operator_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="install the chart"):
        main._refresh_certificate(Cluster(HOOK), tmp_path)  # type: ignore[arg-type]


def test_the_operator_starts_and_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every setting that is changed is one that Kopf has, and the webhook's server takes the certificate."""
    monkeypatch.setattr(main, "connect", lambda: Cluster(SECRET, HOOK))
    monkeypatch.setattr(main, "METRICS_PORT", 0)
    settings, memo = kopf.OperatorSettings(), kopf.Memo()
    known = {name: set(vars(group)) for name, group in vars(settings).items()}

    def shown() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{main._endpoints[0].port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    async def life() -> None:
        await main.start(settings=settings, memo=memo)
        page = await asyncio.to_thread(shown)
        assert float(re.findall(r"^kvpeer_operator_certificate_expiry_timestamp_seconds (\S+)", page, re.M)[0]) > 0
        await main.stop()

    asyncio.run(life())
    assert {name: set(vars(group)) for name, group in vars(settings).items()} == known
    assert isinstance(settings.admission.server, kopf.WebhookServer)
    assert settings.watching.label_selectors["pods"] == "kvpeer.io/cluster"
    assert not logging.getLogger("aiohttp.access").isEnabledFor(logging.INFO)
