"""KVPeerStorage with SGLang's real anchor without bytes, as DeepSeek-V4 has one. Runs in the engine's Python; prints
what it answers as one JSON object."""

from __future__ import annotations

import json

import torch
from kvpeer.engines.sglang import KVPeerStorage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

PAGE_TOKENS = 16
KEYS = [digit * 64 for digit in "abc"]

CONFIG = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=True,
    enable_storage_metrics=False,
    is_page_first_layout=False,
    model_name="anchored",
    extra_config={"weights_identity": "none"},
)


def main() -> None:
    storage = KVPeerStorage(CONFIG)
    pool = LogicalHostPool(8 * PAGE_TOKENS, PAGE_TOKENS)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    indices = torch.arange(len(KEYS) * PAGE_TOKENS)
    side = PoolTransfer(PoolName.SWA, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    without, beside = storage.batch_exists_v2(KEYS, []), storage.batch_exists_v2(KEYS, [side])
    answers = {
        "exists": storage.batch_exists(KEYS),
        "set": storage.batch_set_v1(KEYS, indices),
        "get": storage.batch_get_v1(KEYS, indices),
        "stops": without.restorable_prefix_pages,
        "stops beside a pool that has nothing": beside.restorable_prefix_pages,
        "pages beside a pool that has nothing": beside.kv_hit_pages,
    }
    storage.close()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
