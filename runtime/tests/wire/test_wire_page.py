"""docs/wire.md has every message with its tag and fields, and every code."""

from __future__ import annotations

from pathlib import Path

import msgspec
from kvpeer.wire.messages import Message, RefusalCode

PAGE = (Path(__file__).parents[3] / "docs" / "wire.md").read_text()


def row(message: type[Message]) -> str:
    fields = ", ".join(field.name for field in msgspec.structs.fields(message))
    return f"| {message.__struct_config__.tag} | {message.__name__} | {fields} |"


def test_the_page_has_every_message_as_it_is() -> None:
    missing = [row(message) for message in Message.__subclasses__() if f"\n{row(message)}\n" not in PAGE]
    assert missing == []


def test_the_page_has_every_refusal_code() -> None:
    codes = ", ".join(f"`{code.value}`" for code in RefusalCode)
    assert f"Codes of a Refusal: {codes}." in PAGE
