"""An API server over HTTP: one that answers as it is told, and one that keeps objects and fails as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from store import Store

__all__ = ["FailingServer", "Server"]

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def _resource(name: str, kind: str, namespaced: bool = True) -> dict[str, Any]:
    return {"name": name, "singularName": "", "namespaced": namespaced, "kind": kind, "verbs": _VERBS}


_GROUPS = {
    "kvpeer.io": "v1alpha1",
    "admissionregistration.k8s.io": "v1",
}
_DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "36"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [
            {
                "name": name,
                "versions": [{"groupVersion": f"{name}/{version}", "version": version}],
                "preferredVersion": {"groupVersion": f"{name}/{version}", "version": version},
            }
            for name, version in _GROUPS.items()
        ],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            _resource("pods", "Pod"),
            _resource("services", "Service"),
            _resource("secrets", "Secret"),
        ],
    },
    "/apis/kvpeer.io/v1alpha1": {
        "kind": "APIResourceList",
        "groupVersion": "kvpeer.io/v1alpha1",
        "resources": [
            _resource("peercacheclusters", "PeerCacheCluster"),
            _resource("peercacheclusters/status", "PeerCacheCluster"),
            _resource("p2ppolicies", "P2PPolicy"),
            _resource("p2ppolicies/status", "P2PPolicy"),
        ],
    },
    "/apis/admissionregistration.k8s.io/v1": {
        "kind": "APIResourceList",
        "groupVersion": "admissionregistration.k8s.io/v1",
        "resources": [_resource("mutatingwebhookconfigurations", "MutatingWebhookConfiguration", namespaced=False)],
    },
}


class Server:
    """Answers discovery as a cluster does, everything else with what is set; keeps the requests."""

    def __init__(self) -> None:
        self.status, self.body = 200, dict[str, Any]()
        self.headers: dict[str, str] = {}
        self.requests: list[tuple[str, str, dict[str, list[str]], str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                url = urlsplit(self.path)
                length = int(self.headers.get("Content-Length", 0))
                given = json.loads(self.rfile.read(length)) if length else None
                status, body = 200, _DISCOVERY.get(url.path)
                if body is None:
                    kind = self.headers.get("Content-Type", "")
                    server.requests.append((self.command, url.path, parse_qs(url.query), kind, given))
                    status, body = server.answer(self.command, url.path, parse_qs(url.query), given)
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def answer(self, method: str, path: str, query: dict[str, list[str]], given: Any) -> tuple[int, Mapping[str, Any]]:
        """Status and body."""
        return self.status, self.body

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)

    def refuse(self, status: int, message: str = "no") -> None:
        self.status, self.body = status, {"kind": "Status", "status": "Failure", "message": message, "code": status}


class FailingServer(Server):
    """Keeps a store's objects. fault: from the number of a request and its method, the status to fail with, or 0."""

    def __init__(self, store: Store, fault: Callable[[int, str], int] = lambda number, method: 0) -> None:
        super().__init__()
        self.store = store
        self.fault = fault

    def answer(self, method: str, path: str, query: dict[str, list[str]], given: Any) -> tuple[int, Mapping[str, Any]]:
        """See Server."""
        status = self.fault(len(self.requests), method)
        if status:
            return status, {"kind": "Status", "message": "injected", "code": status}
        parts = path.partition("/namespaces/")[2].split("/")[1:]
        kind, name = _KINDS[parts[0]], (parts[1:2] or [""])[0]
        if method == "GET" and not name:
            labels = query.get("labelSelector", [""])[0]
            items, revision = self.store.list_at(kind, "models")
            if labels:
                items = self.store.list(kind, "models", labels)
            return 200, {"kind": f"{kind}List", "metadata": {"resourceVersion": str(revision)}, "items": list(items)}
        if method == "POST":
            self.store.create(given)
        elif method == "DELETE":
            self.store.delete(kind, "models", name, given["preconditions"]["uid"])
            return 200, {"kind": "Status"}
        elif method == "PATCH":
            (self.store.apply_status if parts[2:] else self.store.apply)(given)
        found = self.store.get(kind, "models", name or given["metadata"]["name"])
        return (200, found) if found is not None else (404, {"kind": "Status", "code": 404, "message": "none"})


_KINDS = {
    "pods": "Pod",
    "services": "Service",
    "secrets": "Secret",
    "peercacheclusters": "PeerCacheCluster",
    "p2ppolicies": "P2PPolicy",
}
