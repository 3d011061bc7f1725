"""Host pools as SGLang lays them out, in numpy: enough of its interface for the parts that do not import it."""

from __future__ import annotations

import numpy as np

LAYERS, HEADS, DIM, PAGE_TOKENS, N_PAGES = 3, 2, 4, 8, 5
TOKENS = PAGE_TOKENS * N_PAGES


class FlatPage:
    """The part of a torch tensor that is read of flat pages."""

    class device:
        type = "cpu"

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.nbytes = array.nbytes

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def contiguous(self) -> FlatPage:
        return FlatPage(np.ascontiguousarray(self.array))


class HostPool:
    """K and V of `N_PAGES` pages in one buffer, in one of SGLang's layouts."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.page_size = PAGE_TOKENS
        self.size = self.logical_size = TOKENS
        self.size_per_token = 2 * LAYERS * HEADS * DIM
        shape = {
            "layer_first": (2, LAYERS, TOKENS, HEADS, DIM),
            "page_first": (2, TOKENS, LAYERS, HEADS, DIM),
            "page_first_direct": (2, N_PAGES, LAYERS, PAGE_TOKENS, HEADS, DIM),
            "page_head": (2, N_PAGES, HEADS, PAGE_TOKENS, LAYERS, DIM),
        }[layout]
        self.array = np.zeros(shape, np.uint8)
        self.kv_buffer = FlatPage(self.array)

    def page(self, number: int) -> np.ndarray:
        """A view of one page."""
        if self.layout == "layer_first":
            return self.array[:, :, number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS]
        if self.layout == "page_first":
            return self.array[:, number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS]
        return self.array[:, number : number + 1]

    def get_page_buffer_meta(self, indices: np.ndarray) -> tuple[list[int], list[int]]:
        base, token = self.kv_buffer.data_ptr(), HEADS * DIM
        v_offset = LAYERS * TOKENS * token
        addresses: list[int] = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                for layer in range(LAYERS):
                    k = base + (layer * TOKENS + index) * token
                    addresses += [k, k + v_offset]
            else:
                k = base + index * LAYERS * token
                addresses += [k, k + v_offset]
        length = PAGE_TOKENS * token * (1 if self.layout == "layer_first" else LAYERS)
        return addresses, [length] * len(addresses)

    def get_data_page(self, index: int, flat: bool = True) -> FlatPage:
        return FlatPage(self.page(index // self.page_size).flatten())

    def get_dummy_flat_data_page(self) -> FlatPage:
        return FlatPage(np.zeros(self.size_per_token * self.page_size, np.uint8))

    def set_from_flat_data_page(self, index: int, data_page: FlatPage) -> None:
        page = self.page(index // self.page_size)
        page[...] = data_page.array.reshape(page.shape)


class CopiesOnly(HostPool):
    """A pool whose pages have no addresses that it would tell, as Mamba's with layer_first."""

    def get_page_buffer_meta(self, indices: np.ndarray) -> tuple[list[int], list[int]]:
        raise ValueError("storage zero-copy requires page_first layout")
