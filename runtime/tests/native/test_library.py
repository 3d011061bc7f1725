"""A library that is missing or does not fit is an error that names the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvpeer.core.extents import SLOTS_PER_EXTENT
from kvpeer.model import HOLDERS_MAX, CapacityError, ConfigError, InternalError, LocalProtocolError, Outcome, Verify
from kvpeer.native import LIBRARY_PATH, DirectoryTable, build_info
from kvpeer.native._errors import Code, error_for
from kvpeer.native._library import ABI_VERSION, declared_functions, load

HEADER = Path(__file__).parents[2] / "native" / "include" / "kvpeer" / "kvpeer.h"


def enum_values(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} {{(.*?)}};", HEADER.read_text(), re.DOTALL)[1]
    return {key: int(value) for key, value in re.findall(r"KVP_(\w+) = (-?\d+)", body)}


def constant(name: str) -> int:
    return int(re.search(rf"#define {name} (\d+)", HEADER.read_text())[1])


def test_a_missing_library_is_named_with_the_fix(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "libkvpeer.so")) + " is missing: .*make native"):
        load(tmp_path / "libkvpeer.so")


def test_a_file_that_is_no_library_is_named(tmp_path):
    path = tmp_path / "libkvpeer.so"
    path.write_bytes(b"not an ELF file")
    with pytest.raises(ConfigError, match=re.escape(str(path)) + " does not load"):
        load(path)


def test_a_library_without_our_functions_is_refused():
    import _ctypes

    with pytest.raises(ConfigError, match="belongs to another version of kvpeer"):
        load(Path(_ctypes.__file__))


def test_the_binding_declares_exactly_the_functions_of_the_header():
    assert set(re.findall(r"^KVP_API [^;(]*?\*?(kvp_\w+)\(", HEADER.read_text(), re.MULTILINE)) == declared_functions()


def test_values_of_the_header_and_of_the_model_are_equal():
    assert constant("KVP_ABI_VERSION") == ABI_VERSION
    assert constant("KVP_HOLDERS_MAX") == HOLDERS_MAX
    assert constant("KVP_SLOTS_PER_EXTENT") == SLOTS_PER_EXTENT
    assert enum_values("kvp_error") == {code.name: code.value for code in Code}
    assert enum_values("kvp_outcome") == {outcome.name: outcome.value for outcome in Outcome}
    assert enum_values("kvp_verify") == {f"VERIFY_{verify.name}": verify.value for verify in Verify}


def test_every_code_becomes_an_error_that_names_the_action():
    for code in Code:
        if code is not Code.OK:
            assert "do a thing: " in str(error_for(code, "do a thing"))
    assert isinstance(error_for(Code.EFULL, "x"), CapacityError)
    assert isinstance(error_for(-99, "x"), InternalError)


def test_a_closed_table_says_so():
    table = DirectoryTable(10, makes_room=True)
    table.close()
    with pytest.raises(LocalProtocolError, match="DirectoryTable is closed"):
        table.stats()


def test_build_info_names_what_matters():
    assert LIBRARY_PATH.name == "libkvpeer.so"
    assert re.search(r"kvpeer \S+; gcc \S+; sanitizer none; checksum (table|pclmul|vpclmul)", build_info())
