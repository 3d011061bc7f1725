"""The `Api` on a real API server, through the dynamic client of `kubernetes`. The only module that talks to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from kubernetes import client, config, dynamic
from kubernetes.dynamic.exceptions import ConflictError, ForbiddenError, NotFoundError, UnprocessibleEntityError

from kvpeer_operator import reconciler
from kvpeer_operator.models import API_VERSION

__all__ = ["FIELD_MANAGER", "KubernetesApi", "connect", "connect_to"]

FIELD_MANAGER = "kvpeer-operator"

DEADLINE_S = (5.0, 10.0)
"""To connect, and for the answer. The webhook's own timeout is 5 s; what takes longer there is lost anyway."""

_API_VERSIONS = {
    "PeerCacheCluster": API_VERSION,
    "P2PPolicy": API_VERSION,
    "MutatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
}


def connect() -> KubernetesApi:
    """The API of the cluster that this pod runs in, or of the user's kubeconfig outside of one."""
    untyped, configuration = cast(Any, config), client.Configuration()
    try:
        untyped.load_incluster_config(client_configuration=configuration)
    except untyped.ConfigException:
        untyped.load_kube_config(client_configuration=configuration)
    return connect_to(configuration)


def connect_to(configuration: client.Configuration, discovery_file: str | None = None) -> KubernetesApi:
    """The API at this address. Never retries by itself: who asks knows when to ask again, and the HTTP client would
    sleep for as long as an answer's Retry-After says."""
    untyped: Any = configuration
    untyped.retries = False
    make_client: Any = dynamic.DynamicClient
    connection = client.ApiClient(configuration)
    return KubernetesApi(make_client(connection, cache_file=discovery_file))


class KubernetesApi:
    """Thread-safe as far as the client's connection pool is. Every call blocks for at most DEADLINE_S."""

    def __init__(self, dynamic_client: Any) -> None:
        self._client = dynamic_client

    def close(self) -> None:
        """Ends the connections."""
        self._client.client.rest_client.pool_manager.clear()

    def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
        """See Api."""
        try:
            found = self._resource(kind).get(name=name, namespace=namespace or None, _request_timeout=DEADLINE_S)
        except NotFoundError:
            return None
        return dict(found.to_dict())

    def list(self, kind: str, namespace: str, labels: str = "") -> Sequence[Mapping[str, Any]]:
        """See Api."""
        resource = self._resource(kind)
        found = resource.get(namespace=namespace, label_selector=labels, _request_timeout=DEADLINE_S)
        return _items(resource, found)

    def list_at(self, kind: str, namespace: str) -> tuple[Sequence[Mapping[str, Any]], int]:
        """See Api. Revisions are the resource versions of lists: numbers that grow, whatever is written."""
        resource = self._resource(kind)
        found = resource.get(namespace=namespace, _request_timeout=DEADLINE_S)
        return _items(resource, found), int(found.metadata.resourceVersion)

    def apply(self, obj: Mapping[str, Any]) -> None:
        """See Api."""
        self._apply(self._resource(obj["kind"]), obj)

    def create(self, obj: Mapping[str, Any]) -> None:
        """See Api."""
        try:
            self._resource(obj["kind"]).create(
                body=dict(obj), namespace=obj["metadata"]["namespace"], _request_timeout=DEADLINE_S
            )
        except ConflictError:
            return
        except (ForbiddenError, UnprocessibleEntityError) as error:
            raise reconciler.ForbiddenError(str(error)) from error

    def replace(self, obj: Mapping[str, Any]) -> bool:
        """Replaces the object if nobody changed it since it was read (its resourceVersion); returns whether."""
        try:
            self._resource(obj["kind"]).replace(
                body=dict(obj), namespace=obj["metadata"].get("namespace"), _request_timeout=DEADLINE_S
            )
        except ConflictError:
            return False
        return True

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """See Api."""
        body = {"preconditions": {"uid": uid}}
        try:
            self._resource(kind).delete(name=name, namespace=namespace, body=body, _request_timeout=DEADLINE_S)
        except (NotFoundError, ConflictError):
            return  # gone, or another one of that name

    def apply_status(self, obj: Mapping[str, Any]) -> None:
        """See Api."""
        try:
            self._apply(self._resource(obj["kind"]).status, obj)
        except NotFoundError:
            return

    def _apply(self, resource: Any, obj: Mapping[str, Any]) -> None:
        self._client.server_side_apply(
            resource,
            body=dict(obj),
            namespace=obj["metadata"]["namespace"],
            field_manager=FIELD_MANAGER,
            force_conflicts=True,
            _request_timeout=DEADLINE_S,
        )

    def _resource(self, kind: str) -> Any:
        return self._client.resources.get(api_version=_API_VERSIONS.get(kind, "v1"), kind=kind)


def _items(resource: Any, found: Any) -> Sequence[Mapping[str, Any]]:
    """Items of a list have no kind of their own."""
    return [{"kind": resource.kind, "apiVersion": resource.group_version, **item.to_dict()} for item in found.items]
