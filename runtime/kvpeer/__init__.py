"""kvpeer: LLM engines pull KV-cache pages from each other instead of recomputing them."""

__version__ = "0.1.0"
