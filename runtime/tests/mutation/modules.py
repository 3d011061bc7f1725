"""Which tests have to kill the mutants of which module: its own fast ones, not whatever else runs through it."""

from __future__ import annotations

__all__ = ["TESTS_OF_MODULE"]

_SLOTS = ("core/test_slots.py", "core/test_slots_accounts.py", "core/test_slots_stateful.py")
_MEMBERSHIP = (
    "core/test_membership_view.py",
    "core/test_membership_probing.py",
    "core/test_membership_rumours.py",
)
_LOCATE = ("core/test_locate.py",)
_TOPOLOGY = ("core/test_topology.py",)
_PULL = ("core/test_pull.py", "core/test_pull_properties.py")

TESTS_OF_MODULE: dict[str, tuple[str, ...]] = {
    "wire/framing": ("wire/test_framing.py",),
    "wire/codec": ("wire/test_codec.py", "wire/test_codec_properties.py"),
    "wire/packing": ("wire/test_packing.py",),
    "core/chain": ("core/test_chain.py",),
    "core/ring": ("core/test_ring.py",),
    "core/extents": ("core/test_extents.py", *_SLOTS),
    "core/resident": _SLOTS,
    "core/residents": _SLOTS,
    "core/room": _SLOTS,
    "core/slots": _SLOTS,
    "core/publisher": ("core/test_publisher.py",),
    "core/owner_stream": ("core/test_publisher.py",),
    "core/directory": ("core/test_directory_shard.py", "core/test_directory_shard_stateful.py"),
    "core/directory_stream": ("core/test_directory_shard.py", "core/test_publisher.py"),
    "core/locate/plan": _LOCATE,
    "core/locate/owners": _LOCATE,
    "core/locate/answers": _LOCATE,
    "core/pull/plan": _PULL,
    "core/pull/pulls": _PULL,
    "core/pull/stale": _PULL,
    "core/producers": _PULL,
    "core/membership/machine": _MEMBERSHIP,
    "core/membership/table": _MEMBERSHIP,
    "core/membership/probing": _MEMBERSHIP,
    "core/membership/dissemination": _MEMBERSHIP,
    "core/membership/rumours": _MEMBERSHIP,
    "core/membership/settings": _MEMBERSHIP,
    "core/disk/pages": ("core/test_disk_pages_stateful.py",),
    "core/disk/segments": ("core/test_disk_pages_stateful.py",),
    "core/disk/write_queue": ("core/test_disk_queue.py",),
    "core/disk/health": ("core/test_disk_queue.py",),
    "core/sources": ("core/test_sources.py",),
    "core/negative": ("core/test_negative.py",),
    "core/breaker": ("core/test_breaker.py",),
    "core/policy/decision": ("core/test_policy.py",),
    "core/policy/sampling": ("core/test_policy.py",),
    "core/policy/guard": ("core/test_policy_guard.py",),
    "core/policy/fit": ("core/test_policy_fit.py",),
    "core/policy/costs": ("core/test_policy_fit.py",),
    "core/policy/ledger": ("core/test_policy_ledger.py",),
    "core/topology/plan": _TOPOLOGY,
    "core/topology/rails": _TOPOLOGY,
    "core/topology/gids": _TOPOLOGY,
    "core/topology/distance": _TOPOLOGY,
    "core/topology/host": _TOPOLOGY,
    "core/eviction/lru": ("core/test_slots.py", "core/test_slots_stateful.py"),
}
"""In the order in which they run: first those whose mistakes mean wrong bytes or calls that never end."""
