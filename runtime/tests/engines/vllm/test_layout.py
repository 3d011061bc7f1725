"""KV-cache layouts: every supported physical order is copied whole, every other one is refused."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
from kvpeer.client.device import EngineLayout
from kvpeer.engines.vllm.layout import engine_layout
from kvpeer.model import ConfigError

N_BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 4, 6
LAYERS = ["layer.0", "layer.1", "layer.2"]

# vLLM's physical orders of the logical axes [layer, block, head, token, content].
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass
class Tensor:
    """A numpy array that answers like a torch tensor."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return self.array.__array_interface__["data"][0]


def caches_in(
    order: tuple[int, ...], n_blocks: int = N_BLOCKS, tokens: int = TOKENS
) -> tuple[dict[str, Tensor], np.ndarray]:
    logical = (len(LAYERS), n_blocks, HEADS, tokens, CONTENT)
    physical = np.arange(np.prod(logical), dtype=np.uint16).reshape([logical[axis] for axis in order])
    view = physical.transpose(np.argsort(order))
    return {name: Tensor(view[i]) for i, name in enumerate(LAYERS)}, physical


def read_block(layout: EngineLayout, memory: np.ndarray, block: int) -> bytes:
    raw = memory.reshape(-1).view(np.uint8)
    start = memory.__array_interface__["data"][0]
    return b"".join(
        raw[int(base) - start + block * int(stride) :][: int(length)].tobytes()
        for base, stride, length in zip(layout.base, layout.stride, layout.length, strict=True)
    )


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_a_page_part_is_every_byte_of_its_block_and_of_no_other(name: str) -> None:
    caches, memory = caches_in(ORDERS[name])
    layout, _ = engine_layout(caches, LAYERS, N_BLOCKS)
    assert layout.part_bytes == memory.nbytes // N_BLOCKS
    for block in range(N_BLOCKS):
        expected = np.sort(np.concatenate([caches[layer].array[block].reshape(-1) for layer in LAYERS]))
        assert np.array_equal(np.sort(np.frombuffer(read_block(layout, memory, block), np.uint16)), expected)


@pytest.mark.parametrize("name", ["LHBNC", "BHLNC"])
def test_a_layout_whose_block_is_not_one_run_is_refused(name: str) -> None:
    caches, _ = caches_in(ORDERS[name])
    with pytest.raises(ConfigError, match=r"layer\.0.*not one run"):
        engine_layout(caches, LAYERS, N_BLOCKS)


def test_layers_side_by_side_in_a_block_become_one_segment() -> None:
    assert len(engine_layout(caches_in(ORDERS["BLHNC"])[0], LAYERS, N_BLOCKS)[0].base) == 1
    assert len(engine_layout(caches_in(ORDERS["LBHNC"])[0], LAYERS, N_BLOCKS)[0].base) == 3


def test_kernel_blocks_are_grouped_into_the_blocks_that_vllm_manages() -> None:
    caches, memory = caches_in(ORDERS["LBHNC"], n_blocks=2 * N_BLOCKS, tokens=TOKENS // 2)
    layout, _ = engine_layout(caches, LAYERS, N_BLOCKS)
    assert layout.part_bytes == memory.nbytes // N_BLOCKS
    assert read_block(layout, memory, 1)[: CONTENT * 2] == caches["layer.0"].array[2].reshape(-1)[:CONTENT].tobytes()


def test_kernel_blocks_that_do_not_group_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not group into 4 blocks"):
        engine_layout(caches_in(ORDERS["LBHNC"])[0], LAYERS, 4)


def test_layers_that_share_a_cache_count_once() -> None:
    caches, memory = caches_in(ORDERS["LBHNC"])
    shared = {**caches, "layer.3": caches["layer.1"]}
    layout, _ = engine_layout(shared, [*LAYERS, "layer.3"], N_BLOCKS)
    assert layout.part_bytes == memory.nbytes // N_BLOCKS


def test_the_description_differs_when_the_bytes_mean_something_else() -> None:
    descriptions = {engine_layout(caches_in(ORDERS[name])[0], LAYERS, N_BLOCKS)[1] for name in ("LBHNC", "LBNHC")}
    descriptions.add(engine_layout(caches_in(ORDERS["LBHNC"])[0], LAYERS[::-1], N_BLOCKS)[1])
    descriptions.add(engine_layout(caches_in(ORDERS["LBHNC"])[0], LAYERS[:2], N_BLOCKS)[1])
    assert len(descriptions) == 4


def test_a_layer_without_a_cache_is_named() -> None:
    caches, _ = caches_in(ORDERS["LBHNC"])
    with pytest.raises(ConfigError, match=r"layer\.9"):
        engine_layout(caches, [*LAYERS, "layer.9"], N_BLOCKS)


def test_a_layout_keeps_the_memory_that_it_describes() -> None:
    caches, _ = caches_in(ORDERS["LBHNC"])
    alive = [weakref.ref(cache) for cache in caches.values()]
    layout, _ = engine_layout(caches, LAYERS, N_BLOCKS)
    del caches
    gc.collect()
    assert all(reference() is not None for reference in alive)
    del layout
    gc.collect()
    assert all(reference() is None for reference in alive)
