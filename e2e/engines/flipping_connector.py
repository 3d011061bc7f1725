"""A negative control: the connectors, but each loaded page has its bytes reversed after they were verified.

Whoever says that two engines give the same output because they share pages must see this one give another.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from kvpeer.client import Client
from kvpeer.engines.vllm.connector import KVPeerConnector
from kvpeer.engines.vllm_tier.connector import KVPeerOffloadingConnector
from kvpeer.model import Outcome

__all__ = ["FlippingConnector", "FlippingOffloadingConnector"]

_fetch, _register_layout = Client.fetch, Client.register_layout


def _remembering_layout(self: Client, layout: Any, copier: Any = None) -> None:
    self._flipped_layout = layout  # type: ignore[attr-defined]
    _register_layout(self, layout, copier)


def _fetch_and_flip(self: Client, chain: Any, blocks: np.ndarray, *arguments: Any, **named: Any) -> np.ndarray:
    outcomes = _fetch(self, chain, blocks, *arguments, **named)
    layout = self._flipped_layout  # type: ignore[attr-defined]
    for block in blocks[outcomes == Outcome.HIT].tolist():
        for base, stride, length in zip(
            layout.base.tolist(), layout.stride.tolist(), layout.length.tolist(), strict=True
        ):
            page = np.frombuffer((ctypes.c_uint8 * length).from_address(base + block * stride), np.uint8)
            page[:] = page[::-1].copy()
    return outcomes


class FlippingConnector(KVPeerConnector):
    """See the module docstring."""


class FlippingOffloadingConnector(KVPeerOffloadingConnector):
    """See the module docstring."""


Client.fetch, Client.register_layout = _fetch_and_flip, _remembering_layout  # type: ignore[method-assign]
