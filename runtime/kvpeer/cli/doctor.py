"""`kvpeer doctor`: its options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvpeer.model import ConfigError

if TYPE_CHECKING:
    from kvpeer.agent.config import Seed

__all__ = ["add_doctor"]

DOCTOR_PORT = 7490
"""Where a doctor listens unless told otherwise; none of the ports that the operator gives agents."""

_DESCRIPTION = """\
Show what this machine has of NUMA nodes, RDMA devices and GPUs, how an agent would use them, and what is wrong, each
with its fix. Run it where the agent runs: in its container. Ends with status 1 if there is a problem; notes are none.
"""


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("doctor", help="look for what is wrong with this machine", description=_DESCRIPTION)
    parser.add_argument("--config", metavar="FILE", help="the agent's configuration; its variables count, too")
    parser.add_argument("--json", action="store_true", help="print values for programs")
    parser.add_argument("--rdma", action="store_true", help="RDMA is required: to be without it is a problem")
    parser.add_argument("--root", metavar="DIR", default="/", help="look there for /sys, /proc and /dev: a recording")
    meeting = parser.add_mutually_exclusive_group()
    meeting.add_argument(
        "--listen",
        metavar="PORT",
        type=_port,
        nargs="?",
        const=DOCTOR_PORT,
        help="wait for a doctor elsewhere (port 7490)",
    )
    meeting.add_argument(
        "--pair",
        metavar="HOST[:PORT]",
        default="",
        help="read pages from the doctor that listens there, and it from here",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kvpeer.agent.doctor.command import DoctorOptions, doctor

    return doctor(
        DoctorOptions(options.config, options.json, options.rdma, options.root, options.listen, _peer(options.pair))
    )


def _peer(text: str) -> Seed | None:
    from kvpeer.agent.config.defaults import parse_seed

    try:
        return parse_seed(text, DOCTOR_PORT) if text else None
    except ConfigError as error:
        raise ConfigError(f"--pair is {text!r}, but must be HOST or HOST:PORT") from error


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return port
