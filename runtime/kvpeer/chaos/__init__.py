"""The fault injector `kvpeer chaos`: proxies that stand before agents and do to their connections what bad networks do.

`faults` and `stream` decide (pure: bytes, time and randomness in, steps out), `proxy` performs. Knows nothing of what
passes: no frame, page or certificate. Needs the standard library only, and pyyaml for scenarios in YAML.
"""
