"""Metrics of the adapters inside engines, which the engines show on their own /metrics with their own labels beside
these. Those of decisions to pull are in `policy`; both adapters have them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvpeer.metrics.definitions import MISSES, OUTCOMES
from kvpeer.metrics.metric import OPEN, Metric, counter, seconds
from kvpeer.metrics.policy import DECISION_REASONS

__all__ = ["SGLANG_METRICS", "VLLM_METRICS"]

VLLM_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "lookups": counter(
            "kvpeer_vllm_lookups_total", "",
            "Lookups by outcome: hit, timeout, deferred_full (too many were waiting), not_awaited (answers were worth "
            "less than the wait), or why the first page was not found.",
            "Does the engine hear of pages in time?",
            outcome=("hit", "timeout", "deferred_full", "not_awaited", *MISSES),
        ),
        "lookup_seconds": seconds(
            "kvpeer_vllm_lookup_seconds", "Time the agent took to answer a lookup.", "Does asking delay requests?"
        ),
        "accepted_tokens": counter(
            "kvpeer_vllm_accepted_tokens_total", "", "Tokens whose load vLLM accepted, by source.",
            "How many tokens were not computed?", source=("own_pool", "peer"),
        ),
        "declined_tokens": counter(
            "kvpeer_vllm_declined_tokens_total", "", "Tokens that could be had and were not loaded, by reason.",
            "What does the policy leave lying?", reason=DECISION_REASONS,
        ),
        "loaded_pages": counter(
            "kvpeer_vllm_loaded_pages_total", "",
            "Page parts of accepted loads by outcome, counted by each rank; all but hit are computed by the engine.",
            "Do loads deliver what lookups promised?", outcome=OUTCOMES,
        ),
        "loaded_bytes": counter(
            "kvpeer_vllm_loaded_bytes_total", "bytes", "Bytes loaded into the engine, over all ranks.",
            "How much is loaded?",
        ),
        "load_seconds": seconds(
            "kvpeer_vllm_load_seconds", "Time from the start of a load to its end, on a rank.",
            "How long do requests wait for pages?",
        ),
        "published_pages": counter(
            "kvpeer_vllm_published_pages_total", "",
            "Page parts by outcome of their publish, counted by each rank: written, present, refused (by the pool), "
            "queue_full, no_agent, revoked (preempted meanwhile), timeout, inconsistent.",
            "Does what is computed reach the pool?",
            outcome=("written", "present", "refused", "queue_full", "no_agent", "revoked", "timeout", "inconsistent"),
        ),
        "published_bytes": counter(
            "kvpeer_vllm_published_bytes_total", "bytes", "Bytes copied into the pool, over all ranks.",
            "How much is published?",
        ),
        "publish_seconds": seconds(
            "kvpeer_vllm_publish_seconds", "Time from the start of a publish to its end, on a rank.",
            "Does publishing keep up?",
        ),
        "unshared_requests": counter(
            "kvpeer_vllm_unshared_requests_total", "",
            "Requests whose pages are neither loaded nor published, by reason.", "Why is nothing shared?",
            reason=("lora", "streaming_session", "not_connected"),
        ),
        "errors": counter(
            "kvpeer_vllm_errors_total", "", "Unexpected errors, each with a traceback in the log, by place.",
            "Is there a bug?", place=OPEN,
        ),
    }
)  # fmt: skip
"""By the name that the connector and the tier count under."""

SGLANG_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "pages": counter(
            "kvpeer_sglang_pages_total", "",
            "Pages asked for (exists: hit, miss), read (get: hit, miss) and published (set: stored, refused), by host "
            "pool.",
            "Does SGLang find, get and share pages?",
            operation=("exists", "get", "set"), pool=OPEN, outcome=("hit", "miss", "stored", "refused"),
        ),
        "call_seconds": seconds(
            "kvpeer_sglang_call_seconds", "How long SGLang's calls took, by operation and host pool.",
            "Do calls delay requests?", operation=("exists", "get", "set"), pool=OPEN,
        ),
        "errors": counter(
            "kvpeer_sglang_errors_total", "", "Unexpected errors, each with a traceback in the log, by place.",
            "Is there a bug?", place=OPEN,
        ),
    }
)  # fmt: skip
"""By the name that the storage backend counts under."""
