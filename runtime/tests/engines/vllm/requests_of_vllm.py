"""Stand-ins for vLLM's own objects, of which the pure parts read a few attributes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

PAGE_TOKENS = 16


def page_hashes(n_pages: int, prompt: str = "p") -> list[bytes]:
    return [hashlib.sha256(f"{prompt}{page}".encode()).digest() for page in range(n_pages)]


@dataclass
class FakeRequest:
    """The attributes of `vllm.v1.request.Request` that the connector reads."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    num_preemptions: int = 0
    lora_request: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False

    @staticmethod
    def of_pages(request_id: str, n_pages: int, extra_tokens: int = 1, prompt: str = "p") -> FakeRequest:
        """A prompt of full pages and some tokens more."""
        return FakeRequest(request_id, n_pages * PAGE_TOKENS + extra_tokens, page_hashes(n_pages, prompt))

    def generate(self, n_tokens: int, prompt: str = "p") -> None:
        """The engine appended sampled tokens; full pages get hashes."""
        self.num_tokens += n_tokens
        self.block_hashes[:] = page_hashes(self.num_tokens // PAGE_TOKENS, prompt)
