"""The HTTP endpoint over a real socket."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from kvpeer.agent.http import REQUESTS_MAX, HttpEndpoint
from kvpeer.metrics import build
from kvpeer.model import ConfigError
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families


class Health:
    reason = ""

    def __call__(self) -> str:
        return self.reason


def no_policy(body: bytes) -> int:
    raise AssertionError


@pytest.fixture
def endpoint() -> Iterator[tuple[HttpEndpoint, Health, CollectorRegistry]]:
    registry, health = CollectorRegistry(), Health()
    served = HttpEndpoint("127.0.0.1", 0, registry, health, no_policy)
    yield served, health, registry
    served.close()


def get(endpoint: HttpEndpoint, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_metrics_page_has_every_count(endpoint: tuple[HttpEndpoint, Health, CollectorRegistry]) -> None:
    served, _, registry = endpoint
    build(registry).counter("kvpeer_links_refusals_total").labels(reason="tls").inc(3)
    status, page = get(served, "/metrics")
    assert status == 200
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["kvpeer_links_refusals_total", "tls"] == 3
    assert samples["kvpeer_links_refusals_total", "cluster"] == 0


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
@pytest.mark.parametrize("version", ["", "1.0.0", "x", "0\0.4", "1.x.0", "99999.0.0", "-1"])
def test_a_scraper_gets_its_metrics_whatever_versions_it_takes(
    endpoint: tuple[HttpEndpoint, Health, CollectorRegistry], kind: str, version: str
) -> None:
    build(endpoint[2])
    request = f"GET /metrics HTTP/1.0\r\nAccept: {kind};version={version}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", endpoint[0].port), 10) as connection:
        connection.sendall(request.encode())
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.0 200 ")
    assert b"kvpeer_" in answer


def test_health_is_ok_or_the_reason(endpoint: tuple[HttpEndpoint, Health, CollectorRegistry]) -> None:
    served, health, _ = endpoint
    assert get(served, "/healthz") == (200, "ok\n")
    health.reason = "the event loop has not run for 12 s"
    assert get(served, "/healthz?verbose=1") == (503, "the event loop has not run for 12 s\n")
    assert get(served, "/")[0] == 404


def test_a_taken_port_is_a_configuration_error(endpoint: tuple[HttpEndpoint, Health, CollectorRegistry]) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use; choose another"):
        HttpEndpoint("127.0.0.1", endpoint[0].port, CollectorRegistry(), Health(), no_policy)
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        HttpEndpoint("192.0.2.77", 0, CollectorRegistry(), Health(), no_policy)


def test_idle_connections_beyond_the_limit_are_closed(endpoint: tuple[HttpEndpoint, Health, CollectorRegistry]) -> None:
    served, _, _ = endpoint
    address = ("127.0.0.1", served.port)
    held = [socket.create_connection(address, 10) for _ in range(REQUESTS_MAX)]
    try:
        with socket.create_connection(address, 10) as further:
            assert further.recv(1) == b""
    finally:
        for connection in held:
            connection.close()


def test_a_closed_endpoint_frees_its_port() -> None:
    first = HttpEndpoint("127.0.0.1", 0, CollectorRegistry(), Health(), no_policy)
    first.close()
    HttpEndpoint("127.0.0.1", first.port, CollectorRegistry(), Health(), no_policy).close()
