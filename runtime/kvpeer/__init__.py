"""kvpeer: LLM engines pull KV-cache pages from each other instead of recomputing them."""

__version__ = "0.1.0"

AGENT_PACKAGES = ("cryptography", "msgspec", "numpy", "prometheus_client", "yaml")
"""What `kvpeer[agent]` brings and the agent cannot do without, by import name. (Without uvloop it is slower.)"""
