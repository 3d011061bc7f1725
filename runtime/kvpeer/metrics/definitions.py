"""Every metric of kvpeer, as plain data: this is the one place where metrics are named.

Names are kvpeer_<subsystem>_<noun>_<unit>[_total] in base units. Labels take few values; where the list is closed, it
is written here, and each series exists from the start with 0. Keys, request ids and agent ids are never labels.
docs/metrics.md is generated from this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from kvpeer.model import Outcome

__all__ = ["LATENCY_BUCKETS_S", "METRICS", "PROMISES", "Metric", "MetricType"]


class MetricType(str, Enum):
    """Kinds of Prometheus metrics in use. Quantiles come from histograms, never from home-made summaries."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


OPEN: tuple[str, ...] = ()
"""Label values that only the code which counts knows (names of tasks, of messages): few, but not listed here."""

LATENCY_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""From a round trip on the control channel (about 0.1 ms) to the longest wait for a pull."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` maps each label to its values, OPEN where they are not listed. `question`: what one asks it
    for."""

    name: str
    type: MetricType
    unit: str
    help: str
    question: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


_OUTCOMES = tuple(outcome.name.lower() for outcome in Outcome)
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


def _counter(name: str, unit: str, text: str, question: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, MetricType.COUNTER, unit, text, question, labels)


def _gauge(name: str, unit: str, text: str, question: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, MetricType.GAUGE, unit, text, question, labels)


def _seconds(name: str, text: str, question: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, MetricType.HISTOGRAM, "seconds", text, question, labels)


METRICS: tuple[Metric, ...] = (
    _gauge("kvpeer_agent_info", "", "1; the labels describe this run.", "Which versions and modes run?",
           version=OPEN, cluster=OPEN, verify=OPEN, security=OPEN),
    _gauge("kvpeer_agent_namespaces", "", "Namespaces among the engines of this agent.",
           "Do engines that should share pages have different namespaces?"),
    _gauge("kvpeer_agent_clients", "", "Engine processes that are connected.", "Is the engine connected?"),
    _counter("kvpeer_agent_client_refusals_total", "", "Engine processes that were not let in, or were dropped.",
             "Does an engine speak another protocol, or are there too many?", reason=_CLIENT_REFUSALS),
    _counter("kvpeer_agent_task_failures_total", "", "Tasks that ended by an unexpected error (it is in the log).",
             "Is there a bug?", task=OPEN),
    _gauge("kvpeer_pool_capacity_bytes", "bytes", "Size of the pool.", "How large is the cache?"),
    _gauge("kvpeer_pool_bytes", "bytes", "Bytes of the pool by what they are used for.", "How full is the cache?",
           state=("used", "free", "quarantined", "spare", "unopened")),
    _gauge("kvpeer_pool_pages", "", "Pages in the pool.", "How many pages are cached?", state=("committed", "writing")),
    _gauge("kvpeer_pool_pins", "", "Fetches that hold pages at the moment.", "What keeps pages from eviction?"),
    _counter("kvpeer_pool_evicted_pages_total", "", "Pages that were evicted for others.", "Is the pool too small?"),
    _counter("kvpeer_pool_expired_pages_total", "", "Reservations that were not written by their deadline.",
             "Do engines die or stall while they publish?"),
    _counter("kvpeer_pool_corrupt_pages_total", "", "Pages whose bytes were found wrong, and put out of use.",
             "Does anything damage memory?"),
    _counter("kvpeer_pool_reported_pages_total", "", "Pages that readers reported corrupt, by what a check of the own "
             "memory found; false: they are right.", "Did own memory rot, or is a reader or the network at fault?",
             outcome=("confirmed", "false", "gone", "dropped")),
    _gauge("kvpeer_pool_numa_pages", "", "Memory pages behind the pool by NUMA node, as its extents were opened.",
           "Is the pool where the NICs and GPUs are?", node=OPEN),
    _gauge("kvpeer_topology_rails", "", "Ports of NICs that are fit to carry pages.", "Does the agent find all NICs?"),
    _gauge("kvpeer_topology_problems", "", "Things that are wrong with NICs, memory or CPUs, by name; `kvpeer doctor` "
           "tells which, and the fix.", "Is the machine set up as it should be?", problem=_TOPOLOGY_PROBLEMS),
    _counter("kvpeer_publish_pages_total", "", "Pages that engines offered.", "Are pages shared at all?",
             outcome=("written", "present", "refused")),
    _counter("kvpeer_locate_pages_total", "", "Pages that engines asked for, by where they were; local: in the "
             "own pool, or on the own disk.",
             "What part of prompts is at peers?", outcome=("local", "peer", "miss")),
    _counter("kvpeer_locate_misses_total", "", "Missing pages by reason.", "Why is the hit rate low?", reason=OPEN),
    _counter("kvpeer_locate_hedges_total", "", "Questions to owners that were late, so that others were asked too.",
             "Are owners slow?"),
    _seconds("kvpeer_locate_seconds", "Duration of a locate.", "Does asking delay requests?"),
    _counter("kvpeer_fetch_pages_total", "",
             "Pages that engines fetched, by what they got: shm, from the own pool; tcp, not there, so to be had from "
             "a peer or the own disk.",
             "Do fetches deliver, and how?", outcome=_OUTCOMES, transport=_TRANSPORTS),
    _seconds("kvpeer_fetch_seconds", "Duration of a fetch of one batch.", "Do fetches delay requests?"),
    _counter("kvpeer_transport_asked_pages_total", "",
             "Pages that producers were asked for, by what came of it; a page may be asked for twice.",
             "Do producers deliver?", outcome=_OUTCOMES, transport=_TRANSPORTS),
    _counter("kvpeer_transport_unasked_pages_total", "", "Pages to be pulled that no producer was asked for.",
             "Does this agent itself hold up pulls?", reason=_UNASKED_REASONS),
    _counter("kvpeer_transport_pulled_bytes_total", "bytes", "Page bytes read from peers.", "How much is pulled?",
             transport=_TRANSPORTS),
    _counter("kvpeer_transport_served_bytes_total", "bytes", "Page bytes sent to peers.", "How much is served?",
             transport=_TRANSPORTS),
    _counter("kvpeer_transport_served_pages_total", "", "Pages that peers asked for.", "Do peers ask for what is gone?",
             outcome=("sent", "stale"), transport=_TRANSPORTS),
    _gauge("kvpeer_transport_served_connections", "", "Data connections of peers.", "Is the limit near?",
           transport=_TRANSPORTS),
    _counter("kvpeer_transport_served_refusals_total", "", "Data connections that were not let in, or were dropped.",
             "Who knocks at the data port, and are readers too slow?", reason=("refused", "protocol", "timeout"),
             transport=_TRANSPORTS),
    _gauge("kvpeer_transport_active", "", "1 for each transport in use.", "Which path do bytes take?",
           transport=_TRANSPORTS),
    _gauge("kvpeer_transport_peers", "", "Producers that pages are read from, by the path that is in use.",
           "Which peers do without RDMA?", transport=_TRANSPORTS),
    _gauge("kvpeer_disk_condition", "", "1 for the state that the disk tier is in; pages are served in ok and full.",
           "Does the disk tier work, and if not, why?", condition=_DISK_CONDITIONS),
    _gauge("kvpeer_disk_capacity_bytes", "bytes", "Room that the disk tier may use; 0 without one.",
           "How large is the disk tier?"),
    _gauge("kvpeer_disk_used_bytes", "bytes", "Size of its files.", "How much of that does it use?"),
    _gauge("kvpeer_disk_pages", "", "Pages that can be read from the disk.", "How many pages does the disk add?"),
    _gauge("kvpeer_disk_queued_pages", "", "Pages that wait to be written.", "Does the disk keep up?"),
    _counter("kvpeer_disk_offered_pages_total", "", "Pages that were to be written, by what became of them; moved: "
             "they left the pool before.", "Is the disk too slow, or too small?",
             outcome=("written", "queue_full", "disk_off", "moved", "no_room")),
    _counter("kvpeer_disk_evicted_pages_total", "", "Pages that were evicted from the disk.", "Is the disk too small?"),
    _counter("kvpeer_disk_corrupt_pages_total", "", "Pages that had other bytes on the disk than were written.",
             "Does the disk rot?"),
    _counter("kvpeer_disk_promoted_pages_total", "", "Pages wanted from the disk, by what came of it.",
             "Is the disk of use, and to whom?", outcome=_OUTCOMES, reader=("own", "peer")),
    _counter("kvpeer_disk_written_bytes_total", "bytes", "Page bytes written to the disk.", "How much is written?"),
    _counter("kvpeer_disk_read_bytes_total", "bytes", "Page bytes read from the disk.", "How much is read?"),
    _gauge("kvpeer_directory_records", "", "Records in this agent's shard.", "Is the directory balanced?"),
    _gauge("kvpeer_directory_holders", "", "Holders in these records.", "How many copies are known?"),
    _gauge("kvpeer_directory_memory_bytes", "bytes", "Memory of the shard.", "What does the directory cost?"),
    _counter("kvpeer_directory_rejected_records_total", "", "Records that a full partition or record did not take.",
             "Do more agents hold one page, or share one partition, than there are places?"),
    _counter("kvpeer_directory_dropped_holders_total", "", "Holders that a full partition dropped for newer ones.",
             "Is partition_records_max too small?"),
    _counter("kvpeer_directory_repairs_total", "", "Partitions that had to be repaired.", "Do streams lose messages?"),
    _counter("kvpeer_directory_send_failures_total", "", "Messages to owners that have to be sent again.",
             "Do owners take what is published?"),
    _counter("kvpeer_directory_unpublished_pages_total", "", "Own pages that had no room in the list of the published.",
             "Are there pages that nobody else finds?"),
    _gauge("kvpeer_membership_members", "", "Members as this agent sees them, itself included.",
           "Do all agents see each other?", state=("alive", "suspect", "dead", "draining")),
    _counter("kvpeer_membership_join_failures_total", "", "Seeds that could not be joined.", "Are the seeds right?"),
    _counter("kvpeer_membership_refused_members_total", "", "Members that were heard of beyond the limit of members.",
             "Is the cluster too large?"),
    _counter("kvpeer_membership_refutations_total", "", "Times that this agent heard that it was suspect or dead.",
             "Is this agent, or its network, too slow?"),
    _gauge("kvpeer_breaker_peers", "", "Peers by the state of their circuit breaker: one for questions to owners, one "
           "for fetches of pages.", "Do peers fail, and at what?",
           plane=("lookup", "data"), state=("closed", "open", "probing")),
    _gauge("kvpeer_links_up", "", "Links to other agents.", "Is the agent connected?", direction=("in", "out")),
    _counter("kvpeer_links_refusals_total", "", "Peers that were refused, or refused us.",
             "Does a foreign or misconfigured agent knock?", reason=_PEER_REFUSALS),
    _counter("kvpeer_links_dial_failures_total", "", "Links that could not be opened.", "Is a peer unreachable?"),
    _counter("kvpeer_links_requests_total", "", "Requests to other agents.", "Do peers answer?", message=OPEN,
             outcome=("answered", "refused", "failed")),
    _seconds("kvpeer_links_request_seconds", "Duration of answered requests.", "Is the control channel slow?",
             message=OPEN),
    _counter("kvpeer_links_served_requests_total", "", "Requests of other agents.", "What load do peers bring?",
             message=OPEN, outcome=("answered", "refused", "failed")),
    _counter("kvpeer_links_late_replies_total", "", "Replies that came after their deadline.",
             "Are deadlines too short?"),
    _counter("kvpeer_links_dropped_notices_total", "", "Notices that were not sent or not served.",
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
