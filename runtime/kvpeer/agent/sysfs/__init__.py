"""Reads a machine's topology from files: /sys, /proc and /dev below a root that tests and recordings replace.

By files alone, without pyverbs or libibverbs: what they would add (limits of devices, the MTU in force) costs opening
every device, and is the verbs transport's to know; names, ports, addresses and places are all in sysfs.
"""

from kvpeer.agent.sysfs.machine import read_machine
from kvpeer.agent.sysfs.tree import Tree

__all__ = ["Tree", "read_machine"]
