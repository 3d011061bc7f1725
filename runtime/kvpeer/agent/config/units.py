"""Sizes such as "64Gi" and durations such as "2s": text <-> plain numbers of bytes and seconds."""

from __future__ import annotations

import re

__all__ = ["format_duration", "format_size", "parse_duration", "parse_size"]

_SIZES = {
    "": 1,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

_NUMBER_UNIT = re.compile(r"\s*(\d{1,19}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size in the notation of Kubernetes quantities: "64Gi", "1.5Mi", "4096", "10G".

    Raises:
        ValueError: the text is no size; the message shows a right one.
    """
    match = _NUMBER_UNIT.fullmatch(text)
    if match is None or match[2] not in _SIZES:
        raise ValueError(
            f"{text!r} is not a size such as 64Gi, 512Mi or 4096 (units: {', '.join(filter(None, _SIZES))})"
        )
    whole, _, fraction = match[1].partition(".")
    scaled = int(whole + fraction) * _SIZES[match[2]]
    size_bytes, rest = divmod(scaled, int(10 ** len(fraction)))
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return size_bytes


def parse_duration(text: str) -> float:
    """Seconds of a duration: "2s", "50ms", "1.5m". A unit is required, so that nobody has to guess one.

    Raises:
        ValueError: the text is no duration; the message shows a right one.
    """
    match = _NUMBER_UNIT.fullmatch(text)
    if match is None or match[2] not in _DURATIONS:
        raise ValueError(f"{text!r} is not a duration such as 2s, 50ms or 1.5m (units: {', '.join(_DURATIONS)})")
    return float(match[1]) * _DURATIONS[match[2]]


def format_size(size_bytes: int) -> str:
    """The size in the largest binary unit that gives a whole number; `parse_size` reads it back."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if size_bytes and size_bytes % _SIZES[unit] == 0:
            return f"{size_bytes // _SIZES[unit]}{unit}"
    return str(size_bytes)


def format_duration(seconds: float) -> str:
    """The duration in seconds, or in milliseconds below one second; `parse_duration` reads it back."""
    return f"{seconds:.9g}s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.9g}ms"
