"""Every metric of the agent, as plain data: metrics are named in this package and nowhere else.

Names are kvpeer_<subsystem>_<noun>_<unit>[_total] in base units. Labels take few values; where the list is closed, it
is written here, and each series exists from the start with 0. Keys, request ids and agent ids are never labels.
docs/metrics.md is generated from the definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvpeer.metrics.metric import OPEN, Metric, counter, gauge, seconds

__all__ = ["METRICS", "MISSES", "OUTCOMES", "PROMISES"]

# Lists that the code has as enums are repeated here, and compared by tests: whoever reads definitions needs no numpy.
OUTCOMES = ("hit", "miss", "stale", "corrupt", "timeout", "refused")
MISSES = ("miss", "negative", "unsure", "late", "failed", "garbled", "no_holder", "breaker_open", "no_owner",
          "no_members")  # fmt: skip
_TRANSPORTS = ("shm", "tcp", "verbs")
_UNASKED_REASONS = ("no_source", "breaker_open", "other_size", "no_room", "writing", "busy", "not_promoted", "late")
_DISK_CONDITIONS = ("off", "opening", "ok", "full", "locked", "read_only", "vanished", "slow", "failing")
_TOPOLOGY_PROBLEMS = (
    "sysfs_unreadable", "device_unknown", "gpu_unknown", "no_rdma_device", "no_device_in_container",
    "device_not_in_container", "device_refused", "efa_needs_nixl", "port_down", "other_port_down", "no_subnet_manager",
    "gid_missing", "gid_link_local_only", "roce_v1_only", "mtu_small", "slow_nic_left_out", "other_fabric_left_out",
    "nic_on_other_node", "nic_without_node", "no_cpu_near", "memory_node_forbidden", "mbind_refused",
    "move_pages_refused", "affinity_refused", "pool_on_other_node", "memlock_low", "memory_limit_low",
    "hugepages_short", "memfd_unsealable", "shm_small",
)  # fmt: skip
_CLIENT_REFUSALS = ("busy", "refused", "hello_timeout", "protocol", "internal")
_PEER_REFUSALS = ("tls", "version", "protocol", "hello_timeout", "cluster", "identity", "self", "limit", "refused_us")

METRICS: tuple[Metric, ...] = (
    gauge("kvpeer_agent_info", "", "1; the labels describe this run.", "Which versions and modes run?",
          version=OPEN, cluster=OPEN, verify=OPEN, security=OPEN),
    gauge("kvpeer_traces_kept", "", "Requests that `kvpeer explain` can be asked about.",
          "How far back can it be asked why a request did not hit?"),
    gauge("kvpeer_traces_memory_bytes", "bytes", "Memory of these traces.", "Is it bounded?"),
    counter("kvpeer_traces_dropped_total", "", "Traces that engines had no room to keep, or could not send.",
            "Are explanations incomplete?"),
    gauge("kvpeer_agent_namespaces", "", "Namespaces among the engines of this agent.",
          "Do engines that should share pages have different namespaces?"),
    gauge("kvpeer_agent_clients", "", "Engine processes that are connected.", "Is the engine connected?"),
    counter("kvpeer_agent_client_refusals_total", "", "Engine processes that were not let in, or were dropped.",
            "Does an engine speak another protocol, or are there too many?", reason=_CLIENT_REFUSALS),
    counter("kvpeer_agent_task_failures_total", "", "Tasks that ended by an unexpected error (it is in the log).",
            "Is there a bug?", task=OPEN),
    gauge("kvpeer_pool_capacity_bytes", "bytes", "Size of the pool.", "How large is the cache?"),
    gauge("kvpeer_pool_bytes", "bytes", "Bytes of the pool by what they are used for.", "How full is the cache?",
          state=("used", "free", "quarantined", "spare", "unopened")),
    gauge("kvpeer_pool_pages", "", "Pages in the pool.", "How many pages are cached?", state=("committed", "writing")),
    gauge("kvpeer_pool_pins", "", "Fetches that hold pages at the moment.", "What keeps pages from eviction?"),
    counter("kvpeer_pool_evicted_pages_total", "", "Pages that were evicted for others.", "Is the pool too small?"),
    counter("kvpeer_pool_expired_pages_total", "", "Reservations that were not written by their deadline.",
            "Do engines die or stall while they publish?"),
    counter("kvpeer_pool_corrupt_pages_total", "", "Pages whose bytes were found wrong, and put out of use.",
            "Does anything damage memory?"),
    counter("kvpeer_pool_reported_pages_total", "", "Pages that readers reported corrupt, by what a check of the own "
            "memory found; false: they are right.", "Did own memory rot, or is a reader or the network at fault?",
            outcome=("confirmed", "false", "gone", "dropped")),
    gauge("kvpeer_pool_numa_pages", "", "Memory pages behind the pool by NUMA node, as its extents were opened.",
          "Is the pool where the NICs and GPUs are?", node=OPEN),
    gauge("kvpeer_topology_rails", "", "Ports of NICs that are fit to carry pages.", "Does the agent find all NICs?"),
    gauge("kvpeer_topology_problems", "", "Things that are wrong with NICs, memory or CPUs, by name; `kvpeer doctor` "
          "tells which, and the fix.", "Is the machine set up as it should be?", problem=_TOPOLOGY_PROBLEMS),
    counter("kvpeer_publish_pages_total", "", "Pages that engines offered.", "Are pages shared at all?",
            outcome=("written", "present", "refused")),
    counter("kvpeer_locate_pages_total", "", "Pages that engines asked for, by where they were; local: in the "
            "own pool, or on the own disk.",
            "What part of prompts is at peers?", outcome=("local", "peer", "miss")),
    counter("kvpeer_locate_misses_total", "", "Missing pages by reason.", "Why is the hit rate low?", reason=MISSES),
    counter("kvpeer_locate_hedges_total", "", "Questions to owners that were late, so that others were asked too.",
            "Are owners slow?"),
    seconds("kvpeer_locate_seconds", "Duration of a locate.", "Does asking delay requests?"),
    counter("kvpeer_fetch_pages_total", "",
            "Pages that engines fetched, by what they got: shm, from the own pool; tcp, not there, so to be had from "
            "a peer or the own disk.",
            "Do fetches deliver, and how?", outcome=OUTCOMES, transport=_TRANSPORTS),
    seconds("kvpeer_fetch_seconds", "Duration of a fetch of one batch.", "Do fetches delay requests?"),
    counter("kvpeer_transport_asked_pages_total", "",
            "Pages that producers were asked for, by what came of it; a page may be asked for twice.",
            "Do producers deliver?", outcome=OUTCOMES, transport=_TRANSPORTS),
    counter("kvpeer_transport_unasked_pages_total", "", "Pages to be pulled that no producer was asked for.",
            "Does this agent itself hold up pulls?", reason=_UNASKED_REASONS),
    counter("kvpeer_transport_pulled_bytes_total", "bytes", "Page bytes read from peers.", "How much is pulled?",
            transport=_TRANSPORTS),
    counter("kvpeer_transport_served_bytes_total", "bytes", "Page bytes sent to peers.", "How much is served?",
            transport=_TRANSPORTS),
    counter("kvpeer_transport_served_pages_total", "", "Pages that peers asked for.", "Do peers ask for what is gone?",
            outcome=("sent", "stale"), transport=_TRANSPORTS),
    gauge("kvpeer_transport_served_connections", "", "Data connections of peers.", "Is the limit near?",
          transport=_TRANSPORTS),
    counter("kvpeer_transport_served_refusals_total", "", "Data connections that were not let in, or were dropped.",
            "Who knocks at the data port, and are readers too slow?", reason=("refused", "protocol", "timeout"),
            transport=_TRANSPORTS),
    gauge("kvpeer_transport_active", "", "1 for each transport in use.", "Which path do bytes take?",
          transport=_TRANSPORTS),
    gauge("kvpeer_transport_peers", "", "Producers that pages are read from, by the path that is in use.",
          "Which peers do without RDMA?", transport=_TRANSPORTS),
    gauge("kvpeer_transport_lanes", "", "Pairs of an own rail and a producer's, by whether pages go by them.",
          "Is a rail lost?", state=("in", "out")),
    gauge("kvpeer_disk_condition", "", "1 for the state that the disk tier is in; pages are served in ok and full.",
          "Does the disk tier work, and if not, why?", condition=_DISK_CONDITIONS),
    gauge("kvpeer_disk_capacity_bytes", "bytes", "Room that the disk tier may use; 0 without one.",
          "How large is the disk tier?"),
    gauge("kvpeer_disk_used_bytes", "bytes", "Size of its files.", "How much of that does it use?"),
    gauge("kvpeer_disk_pages", "", "Pages that can be read from the disk.", "How many pages does the disk add?"),
    gauge("kvpeer_disk_queued_pages", "", "Pages that wait to be written.", "Does the disk keep up?"),
    counter("kvpeer_disk_offered_pages_total", "", "Pages that were to be written, by what became of them; moved: "
            "they left the pool before.", "Is the disk too slow, or too small?",
            outcome=("written", "queue_full", "disk_off", "moved", "no_room")),
    counter("kvpeer_disk_evicted_pages_total", "", "Pages that were evicted from the disk.", "Is the disk too small?"),
    counter("kvpeer_disk_corrupt_pages_total", "", "Pages that had other bytes on the disk than were written.",
            "Does the disk rot?"),
    counter("kvpeer_disk_promoted_pages_total", "", "Pages wanted from the disk, by what came of it.",
            "Is the disk of use, and to whom?", outcome=OUTCOMES, reader=("own", "peer")),
    counter("kvpeer_disk_written_bytes_total", "bytes", "Page bytes written to the disk.", "How much is written?"),
    counter("kvpeer_disk_read_bytes_total", "bytes", "Page bytes read from the disk.", "How much is read?"),
    gauge("kvpeer_directory_records", "", "Records in this agent's shard.", "Is the directory balanced?"),
    gauge("kvpeer_directory_holders", "", "Holders in these records.", "How many copies are known?"),
    gauge("kvpeer_directory_memory_bytes", "bytes", "Memory of the shard.", "What does the directory cost?"),
    counter("kvpeer_directory_rejected_records_total", "", "Records that a full partition or record did not take.",
            "Do more agents hold one page, or share one partition, than there are places?"),
    counter("kvpeer_directory_dropped_holders_total", "", "Holders that a full partition dropped for newer ones.",
            "Is partition_records_max too small?"),
    counter("kvpeer_directory_repairs_total", "", "Partitions that had to be repaired.", "Do streams lose messages?"),
    counter("kvpeer_directory_send_failures_total", "", "Messages to owners that have to be sent again.",
            "Do owners take what is published?"),
    counter("kvpeer_directory_unpublished_pages_total", "", "Own pages that had no room in the list of the published.",
            "Are there pages that nobody else finds?"),
    gauge("kvpeer_membership_members", "", "Members as this agent sees them, itself included.",
          "Do all agents see each other?", state=("alive", "suspect", "dead", "draining")),
    counter("kvpeer_membership_join_failures_total", "", "Seeds that could not be joined.", "Are the seeds right?"),
    counter("kvpeer_membership_refused_members_total", "", "Members that were heard of beyond the limit of members.",
            "Is the cluster too large?"),
    counter("kvpeer_membership_refutations_total", "", "Times that this agent heard that it was suspect or dead.",
            "Is this agent, or its network, too slow?"),
    gauge("kvpeer_breaker_peers", "", "Peers by the state of their circuit breaker: one for questions to owners, one "
          "for fetches of pages.", "Do peers fail, and at what?",
          plane=("lookup", "data"), state=("closed", "open", "probing")),
    gauge("kvpeer_links_up", "", "Links to other agents.", "Is the agent connected?", direction=("in", "out")),
    counter("kvpeer_links_refusals_total", "", "Peers that were refused, or refused us.",
            "Does a foreign or misconfigured agent knock?", reason=_PEER_REFUSALS),
    counter("kvpeer_links_dial_failures_total", "", "Links that could not be opened.", "Is a peer unreachable?"),
    counter("kvpeer_links_requests_total", "", "Requests to other agents.", "Do peers answer?", message=OPEN,
            outcome=("answered", "refused", "failed")),
    seconds("kvpeer_links_request_seconds", "Duration of answered requests.", "Is the control channel slow?",
            message=OPEN),
    counter("kvpeer_links_served_requests_total", "", "Requests of other agents.", "What load do peers bring?",
            message=OPEN, outcome=("answered", "refused", "failed")),
    counter("kvpeer_links_late_replies_total", "", "Replies that came after their deadline.",
            "Are deadlines too short?"),
    counter("kvpeer_links_dropped_notices_total", "", "Notices that were not sent or not served.",
            "Is a peer too slow, or unreachable?", reason=("queue_full", "unreachable", "busy")),
)  # fmt: skip

PROMISES: Mapping[str, str] = MappingProxyType(
    {
        "part of the asked pages that peers had": (
            'sum(rate(kvpeer_locate_pages_total{outcome="peer"}[5m])) / sum(rate(kvpeer_locate_pages_total[5m]))'
        ),
        "part of the fetched pages that arrived": (
            'sum(rate(kvpeer_fetch_pages_total{outcome="hit"}[5m])) / sum(rate(kvpeer_fetch_pages_total[5m]))'
        ),
        "99th percentile of a locate": (
            "histogram_quantile(0.99, sum by (le) (rate(kvpeer_locate_seconds_bucket[5m])))"
        ),
        "agents that see fewer members than others": (
            'kvpeer_membership_members{state="alive"} < on () group_left () '
            'max(kvpeer_membership_members{state="alive"})'
        ),
        "wrong bytes from peers": 'increase(kvpeer_transport_asked_pages_total{outcome="corrupt"}[1h]) > 0',
        "an agent that a bug has hit": "increase(kvpeer_agent_task_failures_total[1h]) > 0",
        "a disk tier that does not work": (
            'kvpeer_disk_condition{condition=~"full|locked|read_only|vanished|slow|failing"} == 1'
        ),
        "a machine that is not set up as it should be": "kvpeer_topology_problems > 0",
        "damaged memory": "increase(kvpeer_pool_corrupt_pages_total[1h]) > 0",
        "pages that are damaged on the way": 'increase(kvpeer_pool_reported_pages_total{outcome="false"}[1h]) > 0',
        "a foreign agent knocks": "sum by (reason) (increase(kvpeer_links_refusals_total[1h])) > 0",
    }
)
"""Questions and their PromQL: dashboards and alerts may build on these."""
