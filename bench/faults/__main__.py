"""See the package's docstring. Exit status 1 if kvpeer shows a fault, or a fault could not be tried on a system."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import attaching, collisions, disk, peers, stale_locations
from faults.fault import Fault, Observation
from faults.kvpeer_system import KVPeer
from faults.peercache_system import PeerCache
from faults.system import System

FAULTS = [
    *stale_locations.FAULTS,
    *collisions.FAULTS,
    *peers.FAULTS,
    *attaching.FAULTS,
    *disk.FAULTS,
]
SYSTEMS: dict[str, type[System]] = {"kvpeer": KVPeer, "peercache": PeerCache}
VERDICTS = {True: "FAULT", False: "not shown", None: "not tried"}


@dataclass(frozen=True)
class Row:
    """One fault on one system. is_shown: None if it could not be tried."""

    fault: str
    system: str
    is_shown: bool | None
    observed: str


def try_fault(fault: Fault, system_class: type[System]) -> Row:
    """Tries a fault on a new cluster, which is gone afterwards."""
    # Unix sockets lie below it: their paths must be short.
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        system = system_class(Path(folder))
        try:
            seen = fault.run(system)
        except Exception as error:  # noqa: BLE001 - the other faults are tried all the same
            seen = Observation(None, f"{type(error).__name__}: {error}")
        finally:
            system.close()
    return Row(fault.name, system.name, seen.is_shown, seen.text)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, one line a fault."""
    systems = list(dict.fromkeys(row.system for row in rows))
    cells = {(row.fault, row.system): f"**{VERDICTS[row.is_shown]}**: {row.observed}" for row in rows}
    lines = [f"| fault | what is done | {' | '.join(systems)} |", "|---" * (2 + len(systems)) + "|"]
    for fault in FAULTS:
        tried = [cells[fault.name, system].replace("\n", " ") for system in systems if (fault.name, system) in cells]
        if tried:
            lines.append(f"| {fault.name} | {fault.done}. | {' | '.join(tried)} |")
    return "\n".join(lines)


def prepare_environment() -> None:
    """For the processes that are started: SGLang on a CPU, no settings of kvpeer but ours, imports from here."""
    for name in [name for name in os.environ if name.startswith("KVPEER_")]:
        del os.environ[name]
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", choices=["peercache"], help="try the faults on this system too")
    parser.add_argument("--fault", action="append", choices=[fault.name for fault in FAULTS], help="only this one")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    if options.against == "peercache" and importlib.util.find_spec("peercache") is None:
        parser.error("PeerCache is not installed where this interpreter looks: `make faults` installs it and runs this")
    prepare_environment()
    rows: list[Row] = []
    for fault in FAULTS:
        if options.fault and fault.name not in options.fault:
            continue
        for name in filter(None, (options.against, "kvpeer")):
            row = try_fault(fault, SYSTEMS[name])
            rows.append(row)
            print(f"{row.fault}, {row.system}: {VERDICTS[row.is_shown]}: {row.observed}", file=sys.stderr, flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(
        any(row.is_shown for row in rows if row.system == KVPeer.name) or any(row.is_shown is None for row in rows)
    )


if __name__ == "__main__":
    sys.exit(main())
