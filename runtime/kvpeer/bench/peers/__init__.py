"""kvpeer beside other systems that move pages between processes: what `kvpeer bench peers` measures.

Every system has one adapter module here, and all of them the same interface (`system.System`): one process serves
pages, others read batches of them. They take turns within one run, on the same machine, pages and batches, while the
processes of all others stand still. The packages of other systems are optional (requirements/peers.in); an adapter
imports its own in its own processes, and a system that cannot run is reported with the reason.
"""
