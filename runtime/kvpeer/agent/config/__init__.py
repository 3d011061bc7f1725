"""The agent's configuration: `load` gives a complete, checked, frozen `AgentConfig`; `effective` prints it.

Source order: defaults < YAML file < environment. Nothing below the composition root reads configuration: inner code
gets plain values.
"""

from kvpeer.agent.config.defaults import Seed, seeds_of
from kvpeer.agent.config.keys import effective
from kvpeer.agent.config.settings import (
    HUGEPAGE_BYTES,
    AgentConfig,
    AgentSettings,
    DirectorySettings,
    DiskSettings,
    LimitSettings,
    MembershipSettings,
    MetricsSettings,
    PoolSettings,
    SecuritySettings,
    TopologySettings,
    TransportSettings,
)
from kvpeer.agent.config.source import load

__all__ = [
    "HUGEPAGE_BYTES",
    "AgentConfig",
    "AgentSettings",
    "DirectorySettings",
    "DiskSettings",
    "LimitSettings",
    "MembershipSettings",
    "MetricsSettings",
    "PoolSettings",
    "SecuritySettings",
    "Seed",
    "TopologySettings",
    "TransportSettings",
    "effective",
    "load",
    "seeds_of",
]
