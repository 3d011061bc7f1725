"""What the `Api` says on the wire, to an HTTP server that answers as it is told. Says nothing of what a real API server
makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_server import Server
from kubernetes import client, dynamic
from kvpeer_operator.kubernetes_api import KubernetesApi
from kvpeer_operator.reconciler import ForbiddenError


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def api(server: Server, tmp_path: Any) -> Iterator[KubernetesApi]:
    configuration = client.Configuration()
    configuration.host = server.url
    configuration.retries = 0
    connection = client.ApiClient(configuration)
    yield KubernetesApi(dynamic.DynamicClient(connection, cache_file=str(tmp_path / "discovery")))
    connection.rest_client.pool_manager.clear()


POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trial", "namespace": "models"}}
STATUS = {
    "apiVersion": "kvpeer.io/v1alpha1",
    "kind": "PeerCacheCluster",
    "metadata": {"name": "chat", "namespace": "models"},
    "status": {"observedGeneration": 3},
}


def test_an_object_is_read_and_one_that_is_not_there_is_none(api: KubernetesApi, server: Server) -> None:
    server.body = POD
    assert api.get("Pod", "models", "trial") == POD
    assert server.requests[-1][:2] == ("GET", "/api/v1/namespaces/models/pods/trial")
    server.refuse(404)
    assert api.get("Pod", "models", "trial") is None


def test_objects_are_listed_by_label_and_have_a_kind(api: KubernetesApi, server: Server) -> None:
    server.body = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [{"metadata": {"name": "a"}}]}
    assert api.list("Pod", "models", "kvpeer.io/cluster=chat") == [
        {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a"}}
    ]
    assert server.requests[-1][2]["labelSelector"] == ["kvpeer.io/cluster=chat"]


def test_fields_are_applied_by_our_manager_and_conflicts_are_won(api: KubernetesApi, server: Server) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "models"}, "spec": {}}
    server.body = service
    api.apply(service)
    method, path, query, content_type, body = server.requests[-1]
    assert (method, path, body) == ("PATCH", "/api/v1/namespaces/models/services/s", service)
    assert content_type == "application/apply-patch+yaml"
    assert (query["fieldManager"], query["force"]) == (["kvpeer-operator"], ["true"])


def test_a_status_goes_to_the_status_alone(api: KubernetesApi, server: Server) -> None:
    server.body = STATUS
    api.apply_status(STATUS)
    method, path, _, content_type, body = server.requests[-1]
    assert (method, content_type, body) == ("PATCH", "application/apply-patch+yaml", STATUS)
    assert path == "/apis/kvpeer.io/v1alpha1/namespaces/models/peercacheclusters/chat/status"
    server.refuse(404)
    api.apply_status(STATUS)  # the object is gone: nothing to say


def test_what_is_there_already_is_left_as_it_is(api: KubernetesApi, server: Server) -> None:
    server.refuse(409)
    api.create(POD)
    assert server.requests[-1][:2] == ("POST", "/api/v1/namespaces/models/pods")
    assert server.requests[-1][4] == POD


@pytest.mark.parametrize("status", [403, 422])
def test_a_creation_that_is_not_allowed_says_why(api: KubernetesApi, server: Server, status: int) -> None:
    server.refuse(status, 'pods "trial" is forbidden: exceeded quota: team')
    with pytest.raises(ForbiddenError, match="exceeded quota: team"):
        api.create(POD)


def test_only_the_object_that_was_seen_is_deleted(api: KubernetesApi, server: Server) -> None:
    server.body = {"kind": "Status", "apiVersion": "v1", "status": "Success"}
    api.delete("Pod", "models", "trial", "u-1")
    method, path, _, _, body = server.requests[-1]
    assert (method, path) == ("DELETE", "/api/v1/namespaces/models/pods/trial")
    assert body["preconditions"] == {"uid": "u-1"}
    for status in (404, 409):
        server.refuse(status)
        api.delete("Pod", "models", "trial", "u-1")


def test_a_replacement_says_whether_somebody_was_faster(api: KubernetesApi, server: Server) -> None:
    hook = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "kvpeer-injection", "resourceVersion": "7"},
        "webhooks": [],
    }
    server.body = hook
    assert api.get("MutatingWebhookConfiguration", "", "kvpeer-injection") == hook
    assert api.replace(hook) is True
    assert server.requests[-1][4]["metadata"]["resourceVersion"] == "7"
    server.refuse(409)
    assert api.replace(hook) is False


@pytest.mark.parametrize("status", [410, 429, 500, 503])
def test_other_failures_are_the_callers(api: KubernetesApi, server: Server, status: int) -> None:
    server.refuse(status)
    for call in (lambda: api.get("Pod", "models", "trial"), lambda: api.create(POD), lambda: api.apply(STATUS)):
        with pytest.raises(Exception, match=str(status)):
            call()
