"""Why pages of a request were not found, pulled or used, in words: the closed list of reasons, with what to do.

A reason is named `<step>.<reason>`: `request` (never asked about), `lookup` (the engine's question to its agent),
`locate` (the agent's to the owners), `decision`, `pull` (no producer was asked) and `page` (what a fetch did to it).
The second half is the value that metrics and messages use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvpeer.core.reasons import DecisionReason, MissReason, UnaskedReason
from kvpeer.model import Outcome

__all__ = ["ADVICE", "Advice", "advice"]


@dataclass(frozen=True, slots=True)
class Advice:
    """What a reason means, and what to do; `fix` is empty where nothing is wrong."""

    meaning: str
    fix: str = ""


_REQUEST = {
    "lora": Advice("Requests with a LoRA adapter are not shared: nothing names the adapter's weights.",
                   "None; serve the merged model if these requests repeat long prefixes."),
    "streaming_session": Advice("A streaming session rewrites its own tokens, its pages mean nothing to others."),
    "not_connected": Advice("The engine had no agent when the request arrived, or its ranks do not agree.",
                            "See whether the agent runs, and the engine's log for `kvpeer:` lines at its start."),
    "no_agent": Advice("The engine's agent did not answer when the request was to be decided.",
                       "See the agent's log and /healthz; an agent that restarts is connected to again by itself."),
    "local_hit": Advice("The engine itself had all that can be reused: nobody was asked."),
    "too_short": Advice("The prompt does not fill a page and a token: there is nothing to share."),
}  # fmt: skip

_LOOKUP = {
    "timeout": Advice("The agent did not answer within `lookup_timeout_s`.",
                      "Look at kvpeer_locate_seconds: slow owners or a busy agent; then raise lookup_timeout_s."),
    "not_awaited": Advice("Waiting longer for an answer was worth less than computing, by what answers brought."),
    "deferred_full": Advice("As many requests waited for an answer as may (`deferred_requests_max`).",
                            "Bursts are computed on purpose; raise deferred_requests_max if it happens all the time."),
    "agent_silent": Advice("The agent did not answer in time; for a second it is not asked again.",
                           "See whether its process gets CPU time (/healthz says so when its event loop stalls)."),
    "no_agent": Advice("There was no connection to the agent.", "See whether the agent runs, and its log."),
    "agent_busy": Advice("The agent refused: one of its limits was reached.",
                         "Look at kvpeer_agent_client_refusals_total; raise limits.clients_max or split the engine."),
    "protocol": Advice("Agent and engine do not understand each other.", "Run the same release of kvpeer on both."),
    "internal": Advice("An unexpected error in the client.", "It is in the engine's log; report it."),
}  # fmt: skip

_LOCATE = {
    MissReason.MISS: Advice(
        "Nobody holds the page: it was never published under this namespace, or is evicted everywhere.",
        "Compare cohorts (`kvpeer status`): engines share only within one. Else the pools are too small for the "
        "prefixes in use (kvpeer_pool_evicted_pages_total): raise pool.size or give agents a disk."),
    MissReason.NEGATIVE: Advice("It was missed a moment ago and not asked for again yet (0.2 s)."),
    MissReason.UNSURE: Advice("The page's owners took the partition over a moment ago and are still being told.",
                              "None: it ends by itself within seconds of a member joining or leaving."),
    MissReason.LATE: Advice("The owners did not answer by the deadline.",
                            "Look at kvpeer_links_requests_total{outcome=\"failed\"} and the network to the owners."),
    MissReason.FAILED: Advice("Every owner failed: no link, or it refused.",
                              "See `kvpeer status`: peers that cannot be reached, and the fixes there."),
    MissReason.GARBLED: Advice("An owner answered what was not asked.", "Run the same release on all agents."),
    MissReason.NO_HOLDER: Advice("It is known to be held, but by no producer that may be asked now.",
                                 "See `kvpeer status` for producers whose breaker is open."),
    MissReason.BREAKER_OPEN: Advice("Every owner is avoided because it failed repeatedly.",
                                    "See `kvpeer status` for the peers and what ails them."),
    MissReason.NO_OWNER: Advice("The ring names no owner: no member is known.",
                                "See whether this agent joined (kvpeer_membership_members, seeds in the agent's log)."),
    MissReason.NO_MEMBERS: Advice("There was no other agent to ask.",
                                  "Start another engine with an agent, or give this one the right seeds."),
}  # fmt: skip

_DECISION = {
    DecisionReason.LOCAL_HIT: Advice("The engine itself had all that can be reused."),
    DecisionReason.NOTHING_FOUND: Advice("Neither the own pool nor a peer continues the prefix.",
                                         "The reason of the first missing page says why."),
    DecisionReason.RELOAD: Advice("Pages of the own pool continue the prefix, and peers have nothing beyond them."),
    DecisionReason.PULL: Advice("Peers have enough beyond the local reach."),
    DecisionReason.MODE_OFF: Advice("Peers have pages, but pulling is off.", "Set the engine's mode to on, or shadow."),
    DecisionReason.BELOW_FLOOR: Advice("Peers have fewer tokens beyond the local reach than min_cached_token_delta.",
                                       "Lower min_cached_token_delta, or set it to auto."),
    DecisionReason.BUSY: Advice("As many loads were under way as are begun without a long wait.",
                                "Peers or the network are slow for the load: look at kvpeer_fetch_seconds."),
    DecisionReason.NO_TIME: Advice("No wait is allowed for a pull.", "Raise load_timeout_s."),
    DecisionReason.NOT_WORTH_IT: Advice(
        "Computing takes no longer than the pull and the margin, as both were measured.",
        "None, unless the estimates above are wrong: compare kvpeer_policy_estimated_seconds_total with measured."),
    DecisionReason.SOURCE_BUSY: Advice("Each producer that has the pages serves as many pulls as it may.",
                                       "Raise pulls_per_source_max, or keep hot prefixes at more replicas."),
    DecisionReason.PAIR_GUARDED: Advice("Pulls from each producer that has the pages took longer than computing would.",
                                        "Look at the pair in `kvpeer status`; the guard tries it again by itself."),
    DecisionReason.ENGINE_GUARDED: Advice("Pulling as a whole took longer than computing would.",
                                          "Look at the network and at transports; the guard tries again by itself."),
    DecisionReason.PROBE: Advice("Pulled to see whether it pays by now."),
    DecisionReason.CONTROL: Advice("Computed on purpose, to learn how long that takes."),
    DecisionReason.SHADOW: Advice("It would have been pulled; the mode is shadow.", "Set the engine's mode to on."),
}  # fmt: skip

_PULL = {
    UnaskedReason.NO_SOURCE: Advice("Nobody was known to hold it who is alive and not avoided."),
    UnaskedReason.BREAKER_OPEN: Advice("Its producer failed repeatedly, and somebody else was just trying it.",
                                       "See `kvpeer status` for the peer and what ails it."),
    UnaskedReason.OTHER_SIZE: Advice("Its holder has another number of bytes under this key.",
                                     "Should not be: report it with both engines' namespaces (`kvpeer status`)."),
    UnaskedReason.NO_ROOM: Advice("The own pool had no slot for it.",
                                  "Raise pool.size: all of it was pinned, being written or at rest."),
    UnaskedReason.WRITING: Advice("An engine of this pod was just writing it itself."),
    UnaskedReason.BUSY: Advice("As many fetches from its producer as may run at a time ran until the deadline.",
                               "Raise transport.connections_per_peer, or keep hot prefixes at more replicas."),
    UnaskedReason.NOT_PROMOTED: Advice("Its producer did not bring it from its disk in time.",
                                       "Look at the producer's disk (kvpeer_disk_condition); give it more pool."),
    UnaskedReason.LATE: Advice("No thread was free before the deadline, or locating took all the time.",
                               "Raise transport.fetch_threads, or the engine's load_timeout_s."),
}  # fmt: skip

_PAGE = {
    Outcome.MISS: Advice("It was gone when it was to be fetched, or no producer was asked."),
    Outcome.STALE: Advice("The producer had reused the slot since it was located.",
                          "Its pool turns over within seconds: raise its pool.size."),
    Outcome.CORRUPT: Advice("Wrong bytes under a valid header: verification kept them from the engine.",
                            "See both agents' logs: the producer checks its own memory and says what it found."),
    Outcome.TIMEOUT: Advice("It was not there by the deadline.",
                            "Look at the pair's bandwidth in `kvpeer status`; then raise the engine's load_timeout_s."),
    Outcome.REFUSED: Advice("The producer answered and would not: a limit, or it is going down.",
                            "Look at its kvpeer_transport_served_refusals_total."),
}  # fmt: skip

ADVICE: Mapping[str, Advice] = MappingProxyType(
    {f"request.{name}": text for name, text in _REQUEST.items()}
    | {f"lookup.{name}": text for name, text in _LOOKUP.items()}
    | {f"locate.{reason.value}": text for reason, text in _LOCATE.items()}
    | {f"decision.{reason.value}": text for reason, text in _DECISION.items()}
    | {f"pull.{reason.value}": text for reason, text in _PULL.items()}
    | {f"page.{outcome.name.lower()}": text for outcome, text in _PAGE.items()}
)
"""By name. A test holds it against the lists of reasons."""

_UNKNOWN = Advice("A reason that this release does not know.", "Use the `kvpeer` of the agent's release.")


def advice(name: str) -> Advice:
    """What is known of a reason; something to say also of one that another release sent."""
    return ADVICE.get(name, _UNKNOWN)
