"""Kubernetes quantities <-> plain numbers. Pure."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["format_bytes", "parse_quantity"]

_SCALES = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate(("K", "M", "G", "T", "P", "E"), start=1)},
}
_QUANTITY = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)(?:([mkMGTPE]|[KMGTPE]i)|[eE](\d{1,2}))?")


def parse_quantity(text: str | int | float) -> Decimal:
    """The number of a quantity: cores, bytes or pieces.

    Raises:
        ValueError: it is no quantity.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None or (match[2] or "") not in _SCALES:
        raise ValueError(f"{text!r} is not a quantity such as 500m, 4 or 64Gi")
    return Decimal(match[1]) * (Decimal(10) ** int(match[3]) if match[3] else _SCALES[match[2] or ""])


def format_bytes(n_bytes: int) -> str:
    """Bytes in the largest binary unit that gives a whole number."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if n_bytes and n_bytes % int(_SCALES[unit]) == 0:
            return f"{n_bytes // int(_SCALES[unit])}{unit}"
    return str(n_bytes)
