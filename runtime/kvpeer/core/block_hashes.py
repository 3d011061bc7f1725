"""The block hashes that vLLM gives the pages of a prompt, from its tokens.

So somebody who has a prompt's tokens can ask who holds its pages without an engine. Text alone: no adapter, no image,
no cache salt. Source: vllm/v1/core/kv_cache_utils.py and vllm/utils/hashing.py of vLLM 0.32.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence

__all__ = ["ALGORITHMS", "block_hashes"]

_NONE = b"\xf6"
_UINT, _BYTES, _TEXT, _ARRAY = 0, 2, 3, 4  # major types of RFC 8949


def block_hashes(tokens: Sequence[int], page_tokens: int, algorithm: str, seed: str) -> list[bytes]:
    """The hash of each whole page. algorithm: one of ALGORITHMS. seed: what the first page's parent is made of."""
    of_seed, of_page = ALGORITHMS[algorithm]
    parent = hashlib.sha256(of_seed(seed)).digest()
    hashes = []
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        parent = hashlib.sha256(of_page(parent, tuple(tokens[start : start + page_tokens]))).digest()
        hashes.append(parent)
    return hashes


def _pickled_seed(seed: str) -> bytes:
    return pickle.dumps(seed, protocol=5)


def _pickled_page(parent: bytes, page: tuple[int, ...]) -> bytes:
    return pickle.dumps((parent, page, None), protocol=5)


def _cbor_page(parent: bytes, page: tuple[int, ...]) -> bytes:
    items = b"".join(_head(_UINT, token) for token in page)
    return _head(_ARRAY, 3) + _head(_BYTES, len(parent)) + parent + _head(_ARRAY, len(page)) + items + _NONE


def _cbor_text(value: str) -> bytes:
    encoded = value.encode()
    return _head(_TEXT, len(encoded)) + encoded


def _head(major: int, number: int) -> bytes:
    """The shortest head of a data item, as canonical CBOR wants it."""
    if number < 24:
        return bytes([major << 5 | number])
    for info, n_bytes in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << (8 * n_bytes):
            return bytes([major << 5 | info]) + number.to_bytes(n_bytes, "big")
    raise ValueError(f"{number} does not fit into 64 bits")


ALGORITHMS: dict[str, tuple[Callable[[str], bytes], Callable[[bytes, tuple[int, ...]], bytes]]] = {
    "sha256": (_pickled_seed, _pickled_page),
    "sha256_cbor": (_cbor_text, _cbor_page),
}
"""By vLLM's names: how a seed, and a page behind its parent's hash, are made into bytes. Those of its algorithms whose
hashes are the same in all processes."""
