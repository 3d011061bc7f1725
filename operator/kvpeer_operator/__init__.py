"""The operator of kvpeer on Kubernetes: custom resources, injection of agents into engine pods, reconciliation.

Pure parts decide (`models`, `schema`, `injection`); what talks to the cluster only calls them.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
