"""Adapters inside inference engines, one package each. Each speaks its engine's interface on one side,
`kvpeer.client` on the other."""

from __future__ import annotations
