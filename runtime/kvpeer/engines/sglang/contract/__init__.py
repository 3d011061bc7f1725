"""A contract suite for HiCache L3 backends: what SGLang's cache controller relies on, with the bytes compared.

Two processes with SGLang's real radix cache, controller and host pools, but no model and no server: A stores, B
restores. It needs SGLang (with the test kit that its wheel ships) and pytest, and says nothing of kvpeer:

    pytest --pyargs kvpeer.engines.sglang.contract -p kvpeer.engines.sglang.contract.plugin
        --l3-backend file --l3-extra-config '{"file_storage_path": "{store}"}'

or, for a backend of your own,

        --l3-backend dynamic --l3-extra-config '{"backend_name": "x", "module_path": "x", "class_name": "X",
        "where": "{store}", "node": "{process}"}'

In the extra config, {store} becomes a folder of each test, {process} is `a` or `b`, and {test} a word that is another
one in each test. Do not give `interface_v1`: the suite runs every case with it and without it. Where there is no GPU,
a plug-in of SGLang (entry points `sglang.srt.plugins`) must stand in for its copy kernels.
"""

from __future__ import annotations

__all__: list[str] = []
