"""SGLang's real host pools, and what kvpeer makes of them. Runs in the engine's Python; prints one JSON object:

for each pool and layout, `same` if the segments of every page are SGLang's own flat page, else what went wrong.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch
from kvpeer.engines.sglang.layout import is_logical, page_layout
from kvpeer.model import ConfigError
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

TOKENS, PAGE_TOKENS, LAYERS = 128, 16, 3


def mha(layout: str, v_head_dim: int = 32) -> Any:
    device_pool = MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=32,
        v_head_dim=v_head_dim,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device_pool._mha_buffer_info()
    return get_mha_host_pool_cls(info)(
        info, 1.5, 0, PAGE_TOKENS, layout, device_capacity_tokens=TOKENS, start_layer=0, end_layer=LAYERS
    )


def mla(layout: str) -> Any:
    device_pool = MLATokenToKVPool(
        size=TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MLATokenToKVPoolHost(
        device_pool._mla_buffer_info(),
        1.5,
        0,
        PAGE_TOKENS,
        layout,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def verdict(make: Callable[[], Any]) -> str:
    try:
        pool = make()
    except Exception as error:  # noqa: BLE001 - it is printed
        return f"not made: {type(error).__name__}: {error}"
    try:
        if is_logical(pool):
            return "logical"
        layout = page_layout("kv", pool)
    except ConfigError as error:
        return f"refused: {error}"
    if layout.segments is None:
        return "copies"
    for buffer in (pool.kv_buffer, getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)):
        if isinstance(buffer, torch.Tensor):
            buffer.view(torch.uint8).random_(0, 256) if buffer.is_contiguous() else None
    columns = (layout.segments.base, layout.segments.stride, layout.segments.length)
    segments = list(zip(*(column.tolist() for column in columns), strict=True))
    for page in range(layout.n_pages):
        found = b"".join(ctypes.string_at(base + page * stride, length) for base, stride, length in segments)
        try:
            flat = pool.get_data_page(page * PAGE_TOKENS, flat=True)
        except NotImplementedError:
            return "strided, no flat pages"
        if found != flat.contiguous().view(torch.uint8).numpy().tobytes():
            return f"page {page} differs"
    return "same"


def main() -> None:
    load_plugins()
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE_TOKENS))
    layouts = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
    made: dict[str, Callable[[], Any]] = {}
    for layout in layouts:
        made[f"mha {layout}"] = lambda layout=layout: mha(layout)
        made[f"asymmetric {layout}"] = lambda layout=layout: mha(layout, v_head_dim=16)
        made[f"mla {layout}"] = lambda layout=layout: mla(layout)
    made["logical"] = lambda: LogicalHostPool(TOKENS, PAGE_TOKENS)
    print(json.dumps({name: verdict(make) for name, make in made.items()}))


if __name__ == "__main__":
    main()
