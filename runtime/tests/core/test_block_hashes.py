"""Hashes of a prompt's pages, against what vLLM 0.32 computed for the same tokens."""

from __future__ import annotations

import pytest
from kvpeer.core.block_hashes import block_hashes

TOKENS = [1, 23, 24, 255, 256, 65535, 65536, 151643, 7]
"""Every length that a number has in CBOR and in a pickle; the last one fills no page."""


@pytest.mark.parametrize(
    ("algorithm", "hashes"),
    [
        (
            "sha256",
            [
                "39d9052d3fc2bd6225da8614f41a3db161e1fc42367aec407cc0ecac1123816b",
                "6262954d3e8aa0068934175bc007005bfa07d9495daea21d5f452fbeebf1d758",
            ],
        ),
        (
            "sha256_cbor",
            [
                "c1493911ccb324f9b34a43d0bf4108a42b0eef837128f0512b6d9d7dfb60d14f",
                "4ba982888d4ce97e077a8fd83103db04fb2d062ebe123b30866e15e54b460c6a",
            ],
        ),
    ],
)
def test_pages_have_the_hashes_that_vllm_gives_them(algorithm: str, hashes: list[str]) -> None:
    assert [found.hex() for found in block_hashes(TOKENS, 4, algorithm, "vllm-none-hash")] == hashes
