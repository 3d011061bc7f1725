"""What a PeerCacheCluster needs in its namespace, and what is true of it: pure functions of what was observed."""

from __future__ import annotations

from kvpeer_operator.reconcile.observed import Observed, is_left_over
from kvpeer_operator.reconcile.plan import Apply, Change, Create, Delete, look_again_s, plan
from kvpeer_operator.reconcile.policies import governing_policy
from kvpeer_operator.reconcile.status import cluster_status, policy_status
from kvpeer_operator.reconcile.telling import Telling, Word, words

__all__ = [
    "Apply",
    "Change",
    "Create",
    "Delete",
    "Observed",
    "Telling",
    "Word",
    "cluster_status",
    "governing_policy",
    "is_left_over",
    "look_again_s",
    "plan",
    "policy_status",
    "words",
]
