"""`kvpeer chaos`: its options, and the scenario that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpeer.model import ConfigError

if TYPE_CHECKING:
    from kvpeer.chaos.faults import Fault
    from kvpeer.chaos.scenario import Scenario

__all__ = ["add_command"]

ROUTE_NAME = "route"
"""Of the one route that flags describe."""

_STRIKES = {
    "corrupt": "flip a bit",
    "truncate": "end the connection in order, in the middle of what is sent (FIN)",
    "reset": "end the connection by a reset (RST)",
    "blackhole": "swallow all that follows and keep the connection open",
}

_ROUTE_OPTIONS = ("listen", "to", "direction", *_STRIKES, "delay_ms", "jitter_ms", "freeze")

_UNITS_S = {"ms": 1e-3, "s": 1.0}
_WINDOW = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s)-(\d{1,9}(?:\.\d{1,9})?)(ms|s)", re.ASCII)

_DESCRIPTION = """\
Stand before an agent's control or data port and inject faults between real agents. The agent listens at --to and tells
its peers --listen (agent.advertise_host, agent.advertise_control_port, agent.advertise_data_port). TLS passes through.
Ends with SIGTERM or SIGINT and prints what it did as JSON.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the others."""
    parser = commands.add_parser("chaos", help="inject faults between agents", description=_DESCRIPTION)
    parser.add_argument("--scenario", metavar="FILE", help="YAML or JSON with any number of routes and faults")
    parser.add_argument("--control", metavar="PATH", default="", help="Unix socket to change faults and see counters")
    parser.add_argument("--seed", type=int, help="repeat the faults of a run that printed this seed")
    route = parser.add_argument_group("one route, instead of a scenario")
    route.add_argument("--listen", metavar="ADDRESS:PORT", help="where peers reach the agent")
    route.add_argument("--to", metavar="ADDRESS:PORT", help="where the agent listens")
    route.add_argument("--direction", choices=("to_agent", "from_agent", "both"), help="of all these faults")
    route.add_argument("--delay-ms", type=float, metavar="MS", help="all bytes arrive so much later")
    route.add_argument("--jitter-ms", type=float, metavar="MS", help="and up to so much more, in order")
    for kind, what in _STRIKES.items():
        route.add_argument(f"--{kind}", type=float, metavar="P", help=f"with this probability in each KiB: {what}")
    route.add_argument(
        "--freeze", action="append", metavar="FROM-UNTIL", default=[], help="hold all bytes then, such as 5s-8s"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kvpeer.chaos.main import run

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    return run(_scenario(options), options.control)


def _scenario(options: argparse.Namespace) -> Scenario:
    from kvpeer.chaos.scenario import Route, Scenario, parse_address, read_scenario

    described = [name for name in _ROUTE_OPTIONS if getattr(options, name) not in (None, [])]
    if options.scenario:
        if described:
            flag = described[0].replace("_", "-")
            raise ConfigError(f"--scenario and --{flag} exclude each other: put the route into the file")
        scenario = read_scenario(options.scenario)
        return scenario if options.seed is None else dataclasses.replace(scenario, seed=options.seed)
    for name in ("listen", "to"):
        if name not in described:
            raise ConfigError(f"--{name} is missing: name --listen and --to, or --scenario")
    listen, to = parse_address(options.listen, "--listen"), parse_address(options.to, "--to")
    return Scenario((Route(ROUTE_NAME, listen, to, tuple(_faults(options))),), options.seed)


def _faults(options: argparse.Namespace) -> Iterator[Fault]:
    direction = options.direction or "both"
    for kind in _STRIKES:
        probability = getattr(options, kind)
        if probability is not None:
            yield _fault(f"--{kind}", kind, direction, probability=probability)
    if options.delay_ms is not None or options.jitter_ms is not None:
        delay = {"delay_ms": options.delay_ms or 0.0, "jitter_ms": options.jitter_ms or 0.0}
        yield _fault("--delay-ms", "delay", direction, **delay)
    for window in options.freeze:
        yield _fault(f"--freeze {window}", "freeze", direction, **_times(window))


def _fault(flag: str, kind: str, direction: str, **values: float) -> Fault:
    from kvpeer.chaos.faults import Direction, Fault, FaultKind

    try:
        return Fault(FaultKind(kind), Direction(direction), **values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _times(window: str) -> dict[str, float]:
    """The times of `5s-8s` or `500ms-2s`, in seconds since the start."""
    match = _WINDOW.fullmatch(window)
    if match is None:
        raise ConfigError(f"--freeze is {window!r}, but must be two times such as 5s-8s or 500ms-2s")
    return {"from_s": float(match[1]) * _UNITS_S[match[2]], "until_s": float(match[3]) * _UNITS_S[match[4]]}
