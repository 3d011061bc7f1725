"""Metrics of the operator. Replicas have no leader, so each shows what itself saw and did."""

from __future__ import annotations

from kvpeer.metrics.metric import Metric, counter, gauge, seconds

__all__ = ["OPERATOR_METRICS", "SKIPS"]

SKIPS = (
    "no-cluster", "not-selected", "images-not-ready", "pod-security", "quota", "unknown-engine", "several-engines",
    "command-override", "environment-override", "conflicting-kv-transfer-config", "conflicting-hicache-backend",
    "hierarchical-cache-off", "unsupported-option", "unknown-version", "unsupported-version",
    "host-network-port-clash", "port-clash", "name-clash", "pod-level-resources", "hugepages-in-best-effort",
    "policy-off", "policy-not-for-engine",
)  # fmt: skip
"""Reasons of the annotation kvpeer.io/skipped; a test compares them with the operator's."""

OPERATOR_METRICS: tuple[Metric, ...] = (
    counter("kvpeer_operator_looks_total", "", "Looks at clusters, by how they ended; gone: there is no such cluster.",
            "Does the operator do its work?", outcome=("done", "gone", "failed")),
    seconds("kvpeer_operator_look_seconds", "Duration of a look at a cluster.", "Is the API server slow?"),
    gauge("kvpeer_operator_queued_clusters", "", "Clusters that are due for a look.", "Does the operator keep up?"),
    counter("kvpeer_operator_admissions_total", "", "Pods that came to the webhook, by what was done: agent: it was "
            "added; present: it was there; failed: an error, and the pod runs without; else why it was left alone.",
            "Why has a pod no agent?", outcome=("agent", "present", "failed", *SKIPS)),
    seconds("kvpeer_operator_admission_seconds", "Duration of an answer of the webhook.", "Does it delay new pods?"),
    gauge("kvpeer_operator_clusters", "", "Clusters by what their conditions say.", "Is a cluster not as it should be?",
          condition=("ImagesReady", "SecretReady", "UpToDate", "Ready"), status=("True", "False", "Unknown")),
    gauge("kvpeer_operator_members", "", "Pods of all clusters, as the clusters' status counts them.",
          "Do engines have their agents?", state=("expected", "ready", "outdated", "skipped")),
    gauge("kvpeer_operator_policies", "", "Policies by the mode that is in effect.", "Is pulling turned on?",
          mode=("Off", "Shadow", "On")),
    gauge("kvpeer_operator_certificate_expiry_timestamp_seconds", "seconds", "End of the webhook's certificate, in "
          "seconds since 1970.", "Is the certificate renewed in time?"),
    counter("kvpeer_operator_certificate_failures_total", "", "Times that the certificate could not be looked after.",
            "Will the webhook be believed?"),
)  # fmt: skip
