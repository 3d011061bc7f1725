"""What others let one see, and where kvpeer shows the same: a table of docs/metrics.md."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMPARISON", "Row"]


class Row(NamedTuple):
    """`theirs`: as they name it. `ours`: selectors, none where there is nothing to show. `note`: what differs."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    note: str = ""


_PEERCACHE = (
    Row(("peercache_read_requests_total", "read_hits_total", "read_misses_total", "read_hit_rate"),
        ("kvpeer_fetch_pages_total",), "by outcome: stale, corrupt, timeout and refused are not misses"),
    Row(("peercache_read_local_hits_total", "read_remote_hits_total", "read_disk_hits_total"),
        ("kvpeer_fetch_pages_total", "kvpeer_transport_asked_pages_total", "kvpeer_disk_promoted_pages_total")),
    Row(("peercache_read_failures_total",), ("kvpeer_transport_asked_pages_total",), "by outcome and transport"),
    Row(("peercache_write_requests_total", "bytes_written_total"),
        ("kvpeer_publish_pages_total", "kvpeer_vllm_published_bytes_total")),
    Row(("peercache_bytes_read_total",), ("kvpeer_transport_pulled_bytes_total", "kvpeer_vllm_loaded_bytes_total")),
    Row(("peercache_evictions_total", "disk_evictions_total"),
        ("kvpeer_pool_evicted_pages_total", "kvpeer_disk_evicted_pages_total")),
    Row(("peercache_disk_writes_total", "disk_bytes_written_total", "promotes_total"),
        ("kvpeer_disk_offered_pages_total", "kvpeer_disk_written_bytes_total", "kvpeer_disk_promoted_pages_total")),
    Row(("peercache_directory_republishes_total", "directory_lookups_saved_total"),
        ("kvpeer_directory_repairs_total", 'kvpeer_locate_misses_total{reason="negative"}')),
    Row(("peercache_exists_requests_total", "exists_pages_found_total"), ("kvpeer_locate_pages_total",)),
    Row(("peercache_pool_bytes_used", "pool_capacity_bytes", "pool_keys"),
        ("kvpeer_pool_bytes", "kvpeer_pool_capacity_bytes", "kvpeer_pool_pages")),
    Row(("peercache_disk_bytes_used", "disk_capacity_bytes", "disk_keys"),
        ("kvpeer_disk_used_bytes", "kvpeer_disk_capacity_bytes", "kvpeer_disk_pages")),
    Row(("peercache_members", "storage_nodes"), ("kvpeer_membership_members",), "by state, as each agent sees them"),
    Row(("peercache_uptime_seconds",), ("process_start_time_seconds",)),
    Row(("peercache_rdma_rails",), ("kvpeer_topology_rails",)),
    Row(("peercache_rdma_read_timeouts", "rdma_read_wc_errors", "rdma_post_failures", "rdma_channel_discards",
         "rdma_write_timeouts", "rdma_write_wc_errors"),
        ('kvpeer_transport_asked_pages_total{transport="verbs"}', "kvpeer_breaker_peers"),
        "a read that fails is one of the outcomes; there are no remote writes"),
    Row(("peercache_rdma_last_wc_status",), (), "the status is in the text of the error, in the log"),
    Row(("peercache_rdma_lease_failures",),
        ("kvpeer_transport_unasked_pages_total", "kvpeer_transport_served_pages_total")),
    Row(("peercache_rdma_local_reg_misses", "rdma_lazy_local_mrs"), (),
        "there are none: pages are read into the pool, which is registered before"),
    Row(("peercache_op_latency_seconds",), ("kvpeer_locate_seconds", "kvpeer_fetch_seconds"),
        "histograms, so that they add up over agents"),
)  # fmt: skip

_LLM_D = (
    Row(("vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"),
        ("kvpeer_vllm_loaded_bytes_total", "kvpeer_vllm_published_bytes_total")),
    Row(("vllm:kv_offload_load_time", "vllm:kv_offload_store_time"),
        ("kvpeer_vllm_load_seconds", "kvpeer_vllm_publish_seconds")),
    Row(('vllm:kv_offload_tiering_chunk_queries{tier="1:p2p"}', "chunk_hits"), ("kvpeer_vllm_lookups_total",),
        "with the tier, vLLM's own under `1:kvpeer` besides"),
    Row(("vllm:kv_offload_tiering_read_bytes",), ("kvpeer_transport_pulled_bytes_total",)),
    Row(("vllm:kv_offload_tiering_promotion_job_failures", "cascade_job_failures"),
        ("kvpeer_vllm_loaded_pages_total", "kvpeer_vllm_published_pages_total"), "by outcome"),
    Row(("vllm:kv_offload_tiering_active_promotion_jobs",), ('kvpeer_policy_decisions_total{reason="busy"}',),
        "loads under way are limited; what the limit turned away is counted"),
    Row(("vllm:kv_offload_tiering_lookup_sync_delay_seconds", "lookup_async_delay_seconds"),
        ("kvpeer_vllm_lookup_seconds", "kvpeer_locate_seconds")),
    Row(("vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total"),
        ("kvpeer_vllm_accepted_tokens_total",), "vLLM shows its own with kvpeer, too"),
    Row(("vllm:prompt_tokens_cached_by_source",), ("kvpeer_vllm_accepted_tokens_total",),
        "vLLM shows its own with kvpeer, too: `host` is the own pool, `p2p` the peers"),
    Row(("vllm:nixl_bytes_transferred", "vllm:nixl_xfer_time_seconds"),
        ("kvpeer_transport_pulled_bytes_total", "kvpeer_fetch_seconds")),
    Row(("vllm:nixl_num_failed_transfers", "vllm:nixl_num_kv_expired_reqs"),
        ("kvpeer_transport_asked_pages_total", 'kvpeer_transport_asked_pages_total{outcome="stale"}')),
    Row((),
        ("kvpeer_policy_decisions_total", "kvpeer_policy_pull_effect_seconds_total", "kvpeer_policy_guarded",
         "kvpeer_policy_shadow_effect_seconds_total"),
        "what was decided and why, and whether it paid; there, pulls are derived from logs"),
)  # fmt: skip

COMPARISON: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("PeerCache's page (0.8.4)", _PEERCACHE),
    ("llm-d's guides (vLLM's offloading and NIXL)", _LLM_D),
)
"""Rows by whose they are."""
