"""Where NICs, memory and threads belong on a machine, decided from values alone.

`plan(machine, request)` returns a `Plan` with its problems; `judge` adds those of the host and the container.
`kvpeer.agent.sysfs` reads the machine, `kvpeer.agent.placement` does what the plan says.
"""

from kvpeer.core.topology.distance import Proximity
from kvpeer.core.topology.host import HostFacts, PoolNeeds, judge
from kvpeer.core.topology.machine import (
    NODE_UNKNOWN,
    Gid,
    GidKind,
    Gpu,
    LinkLayer,
    Machine,
    Node,
    Port,
    PortState,
    RdmaDevice,
    natural,
    number_list,
    pci_order,
)
from kvpeer.core.topology.plan import RANKS_MAX, Plan, PlanRequest, RankPlan, plan
from kvpeer.core.topology.problems import FIXES, Problem, ProblemName, Severity, collect
from kvpeer.core.topology.rails import Rail

__all__ = [
    "FIXES",
    "NODE_UNKNOWN",
    "RANKS_MAX",
    "Gid",
    "GidKind",
    "Gpu",
    "HostFacts",
    "LinkLayer",
    "Machine",
    "Node",
    "Plan",
    "PlanRequest",
    "PoolNeeds",
    "Port",
    "PortState",
    "Problem",
    "ProblemName",
    "Proximity",
    "Rail",
    "RankPlan",
    "RdmaDevice",
    "Severity",
    "collect",
    "judge",
    "natural",
    "number_list",
    "pci_order",
    "plan",
]
