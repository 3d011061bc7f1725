"""Faults of a peer-to-peer KV cache, each tried on kvpeer and on PeerCache in the same way.

    python bench/faults                        # kvpeer alone
    python bench/faults --against peercache    # both; prints the table

Needs SGLang in the interpreter, because both systems are HiCache storage backends and are tried as such: real
processes with SGLang's own host pools, loopback TCP between them. docs/faults.md says what each fault is.
"""
