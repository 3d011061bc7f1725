"""The operator's process: Kopf's watches mark clusters, one task looks at them, the webhook answers.

Run by `kopf run --standalone --all-namespaces -m kvpeer_operator.main`. Replicas need no leader: every change is the
same whoever makes it, and is made only where it is missing. No finalizers, annotations or timers on anybody's objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any, cast

import kopf
from jsonpatch import apply_patch

from kvpeer_operator.injection import CLUSTER_LABEL
from kvpeer_operator.kubernetes_api import KubernetesApi, connect
from kvpeer_operator.metrics import Endpoint, OperatorMetrics
from kvpeer_operator.models import API_GROUP
from kvpeer_operator.recent_reads import RecentReads
from kvpeer_operator.reconciler import Reconciler, admit_pod
from kvpeer_operator.serving import Serving, ca_bundle, decoded, expires_at, is_due, issue, webhook_hosts
from kvpeer_operator.telling import post_words
from kvpeer_operator.work import ClusterKey, WorkQueue

__all__: list[str] = []

WEBHOOK_PORT = 9443
METRICS_PORT = 8081
CERTIFICATE_CHECK_S = 3600.0
"""Between two looks at the serving certificate, which is renewed months before its end."""
CERTIFICATE_ATTEMPTS = 5
"""Replicas that start together make a certificate each; one is kept, and the others read it."""

_log = logging.getLogger(__name__)
_queue = WorkQueue()
_wake = asyncio.Event()
_tasks: set[asyncio.Task[None]] = set()
_metrics = OperatorMetrics()
_endpoints: list[Endpoint] = []


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Connects, makes the certificate, starts the tasks."""
    # A line for each probe of the kubelet's and each pod would bury what matters.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    settings.posting.enabled = False
    settings.scanning.disabled = True  # the resources are there before the operator, in all or in given namespaces
    settings.watching.server_timeout, settings.watching.client_timeout, settings.watching.connect_timeout = 120, 150, 5
    settings.watching.label_selectors["pods"] = CLUSTER_LABEL  # the server's business: other pods never come here
    _endpoints.append(Endpoint.serve(METRICS_PORT, _metrics))
    api = await asyncio.to_thread(connect)
    memo.reads = RecentReads(api, time.monotonic)
    folder = Path(os.environ["KVPEER_OPERATOR_CERTIFICATE_DIR"])
    await asyncio.to_thread(_refresh_certificate, api, folder)
    settings.admission.server = kopf.WebhookServer(
        port=WEBHOOK_PORT, certfile=folder / "tls.crt", pkeyfile=folder / "tls.key", cafile=folder / "ca.crt"
    )
    for work in (_look_at_clusters(Reconciler(api, post_words)), _keep_certificate(api, folder)):
        _tasks.add(asyncio.create_task(work))


@kopf.on.cleanup()
async def stop(**_: Any) -> None:
    """Ends the tasks."""
    for task in _tasks:
        task.cancel()
    await asyncio.wait(_tasks, timeout=10)
    while _endpoints:
        await asyncio.to_thread(_endpoints.pop().close)


@kopf.on.event(API_GROUP, "peercacheclusters")
async def cluster_changed(namespace: str | None, name: str | None, **_: Any) -> None:
    """A cluster was made, changed or deleted."""
    _mark(namespace, name)


@kopf.on.event(API_GROUP, "p2ppolicies")
async def policy_changed(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
    """A policy of a cluster was made, changed or deleted."""
    _mark(namespace, spec.get("clusterRef", {}).get("name"))


@kopf.on.event("", "v1", "pods", labels={CLUSTER_LABEL: kopf.PRESENT})
async def pod_changed(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
    """A pod of a cluster was made, changed or deleted."""
    _mark(namespace, labels.get(CLUSTER_LABEL))


@kopf.on.mutate("", "v1", "pods", id="inject", operations=["CREATE"], labels={CLUSTER_LABEL: kopf.PRESENT})
def inject_agent(body: kopf.Body, namespace: str | None, patch: kopf.Patch, memo: kopf.Memo, **_: Any) -> None:
    """Gives a pod that opted in its agent, or notes why it has none. In a thread of Kopf's."""
    began_at = time.monotonic()
    try:
        result, skip = admit_pod(memo.reads, dict(body), namespace or "default")
    except Exception:
        _metrics.admission_failed(time.monotonic() - began_at)
        raise
    _metrics.admitted(result, skip, time.monotonic() - began_at)
    operations: Any = list(result.operations)
    if operations:
        patch.fns.append(lambda pod: apply_patch(cast(Any, pod), operations, in_place=True))
    if skip:
        _log.info("a pod of %s is left alone: %s: %s", namespace, skip.reason.value, skip.message)


def _mark(namespace: str | None, name: str | None) -> None:
    if namespace and name:
        _queue.changed(ClusterKey(namespace, name), time.monotonic())
        _wake.set()


async def _look_at_clusters(reconciler: Reconciler) -> None:
    while True:
        _metrics.queued(_queue.n_due(time.monotonic()))
        key = _queue.take(time.monotonic())
        if key is None:
            _wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_wake.wait(), _queue.wait_s(time.monotonic()))
            continue
        began_at = time.monotonic()
        now, timestamp = time.time(), datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            again_s = await asyncio.to_thread(reconciler.look, key, now, timestamp, secrets.token_hex(32))
        except Exception:  # noqa: BLE001 - a task's root: whatever one cluster has must not keep the others from being looked at
            outcome = "failed"
            _log.exception("%s/%s: again in %.0f s", *key, _queue.failed(key, time.monotonic()))
        else:
            outcome = "gone" if again_s is None else "done"
            _queue.done(key, time.monotonic(), again_s)
        _metrics.looked(outcome, time.monotonic() - began_at, reconciler.seen)


async def _keep_certificate(api: KubernetesApi, folder: Path) -> None:
    while True:
        await asyncio.sleep(CERTIFICATE_CHECK_S)
        try:
            await asyncio.to_thread(_refresh_certificate, api, folder)
        except Exception:  # noqa: BLE001 - a task's root: it is tried again long before the certificate ends
            _metrics.certificate_failed()
            _log.exception("the webhook's certificate cannot be renewed")


def _refresh_certificate(api: KubernetesApi, folder: Path) -> None:
    """Makes a certificate if one is due, has the webhook configuration trust it, and writes it where Kopf reads it."""
    namespace, release = os.environ["KVPEER_OPERATOR_NAMESPACE"], os.environ["KVPEER_OPERATOR_RELEASE"]
    serving = _current_certificate(
        api, namespace, f"{release}-webhook-certificate", webhook_hosts(f"{release}-webhook", namespace)
    )
    hook = api.get("MutatingWebhookConfiguration", "", f"{release}-injection")
    bundle = ca_bundle(serving)
    if hook and any(each["clientConfig"].get("caBundle") != bundle for each in hook["webhooks"]):
        for each in hook["webhooks"]:
            each["clientConfig"]["caBundle"] = bundle
        api.replace(hook)  # lost to another replica: it wrote the same
    for name, text in (("tls.crt", serving.certificate), ("tls.key", serving.key), ("ca.crt", serving.authority)):
        draft = folder / f".{name}"
        draft.touch(mode=0o600)
        draft.write_text(text)
        draft.rename(folder / name)
    _metrics.certificate(expires_at(serving))


def _current_certificate(api: KubernetesApi, namespace: str, name: str, hosts: list[str]) -> Serving:
    """The certificate in the Secret of this name, which Helm made; a new one is written if it is due.

    Raises:
        RuntimeError: there is no such Secret, or other replicas keep changing it.
    """
    for _ in range(CERTIFICATE_ATTEMPTS):
        secret = api.get("Secret", namespace, name)
        if secret is None:
            raise RuntimeError(f"there is no Secret {namespace}/{name}: install the chart anew")
        current = decoded(secret.get("data"))
        if current and not is_due(current, hosts, datetime.datetime.now(datetime.timezone.utc)):
            return current
        made = issue(hosts, datetime.datetime.now(datetime.timezone.utc), current)
        if api.replace({**secret, "data": made.encoded()}):
            return made
    raise RuntimeError(f"Secret {namespace}/{name} changes all the time: is another operator installed?")
