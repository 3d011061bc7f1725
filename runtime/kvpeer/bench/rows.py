"""The rows that every benchmark of the project writes, and the budgets that they are held against. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvpeer.model import ConfigError

__all__ = ["Budget", "Row", "decode_rows", "encode_rows"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number beside its reference.

    name: what was measured, in dotted words, the same from release to release. page_bytes, threads: None where the
    number does not depend on them. value: the median over all rounds, in `unit`. reference: the median of what was
    measured beside it in the same rounds and the same unit, and `reference_name` what that is; None without one.
    ratio: the median of value / reference of each round, which is not the quotient of the two medians. spread: the
    lower and upper quartile over the rounds, of the ratio, or of the value where there is no reference. budget: see
    `Budget`; None for what is reported and not judged. holds: whether the budget does; None without one.
    """

    name: str
    page_bytes: int | None
    threads: int | None
    value: float
    unit: str
    reference_name: str | None
    reference: float | None
    ratio: float | None
    spread: tuple[float, float]
    budget: str | None
    holds: bool | None


_OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}
_BUDGET = re.compile(r"(ratio|value|excess) (<=|>=|<) (\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on a row: `ratio >= 0.9`, `value < 80` or, for what is added to the reference, `excess <= 150`.

    subject: ratio, value, or excess (value - reference). The direction stands in the operator, because a ratio of
    times should be small and a ratio of bandwidths large.
    """

    subject: str
    operator: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Returns the budget that the text says.

        Raises:
            ConfigError: it says none.
        """
        match = _BUDGET.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a budget such as 'ratio >= 0.9', 'value < 80' or 'excess <= 150'")
        return cls(match[1], match[2], float(match[3]))

    def holds(self, value: float, reference: float | None, ratio: float | None) -> bool:
        """Returns whether these numbers of a row are within the budget.

        Raises:
            ConfigError: the budget is about a reference, and there is none.
        """
        if self.subject == "value":
            judged = value
        elif reference is None or ratio is None:
            raise ConfigError(f"the budget {self.subject} {self.operator} {self.limit:g} needs a reference")
        else:
            judged = ratio if self.subject == "ratio" else value - reference
        return _OPERATORS[self.operator](judged, self.limit)


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Returns the rows as a JSON list, indented for people."""
    return msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n"


def decode_rows(document: bytes) -> list[Row]:
    """Returns the rows of a JSON list.

    Raises:
        ConfigError: it is not a list of rows; the message names the fault.
    """
    try:
        return msgspec.json.decode(document, type=list[Row])
    except msgspec.DecodeError as fault:
        raise ConfigError(f"not a list of benchmark rows: {fault}") from fault
