"""Writes what is expected of each shape anew. Look at the difference before you commit it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvpeer.agent.sysfs import read_machine

from machines import SHAPES, expand, shape_text
from machines.expected import expected_text

for shape in SHAPES:
    with tempfile.TemporaryDirectory() as folder:
        text = expected_text(read_machine(expand(shape_text(shape), Path(folder))))
    (Path(__file__).parent / "shapes" / f"{shape}.plan").write_text(text)
