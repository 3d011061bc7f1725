"""What `kvpeer doctor` does: looks, judges, prints, and has a canary fly to another doctor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpeer.agent.config import AgentConfig, Seed, load
from kvpeer.agent.doctor.canary import CanaryResult, Doctor
from kvpeer.agent.doctor.report import as_values, facts_text, plan_text, problems_text
from kvpeer.agent.facts import read_facts
from kvpeer.agent.placement import plan_request, pool_needs
from kvpeer.agent.sysfs import read_machine
from kvpeer.core.topology import Problem, Severity, judge, plan
from kvpeer.model import PeerUnavailableError

__all__ = ["DoctorOptions", "doctor"]

EXIT_PROBLEMS = 1

_ANYWHERE = "192.0.2.1"
"""Reserved for documentation: the route to it is the default route. Nothing is sent there."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """As typed. `root`: another place than / to look for /sys, /proc and /dev. `listen`: the port, None not to."""

    config: str | None = None
    is_json: bool = False
    requires_rdma: bool = False
    root: str = "/"
    listen: int | None = None
    pair: Seed | None = None


def doctor(options: DoctorOptions) -> int:
    """Prints what was found and returns 0, or EXIT_PROBLEMS when something is wrong.

    Raises:
        ConfigError: the configuration is.
    """
    config, peer = _load(options), options.pair
    if options.listen is not None:
        return asyncio.run(_listen(config, options.listen))
    values, problems = _examine_machine(config, options)
    is_sound = all(problem.severity is Severity.NOTE for problem in problems)
    if peer is not None:
        values["pair"], has_flown = asyncio.run(_examine_pair(config, peer))
        is_sound = is_sound and has_flown
        if not options.is_json:
            sys.stdout.write(_pair_text(values["pair"]))
    if options.is_json:
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
    return 0 if is_sound else EXIT_PROBLEMS


def _load(options: DoctorOptions) -> AgentConfig:
    """An agent without seeds listens on loopback; a doctor that speaks to others, on the address on the route to
    them."""
    config = load(options.config, os.environ)
    peer = options.pair
    if config.agent.seeds or (peer is None and options.listen is None):
        return config
    towards = _address(peer.host, peer.port) if peer else _address(_ANYWHERE, 1)
    return load(options.config, {**os.environ, "KVPEER_AGENT_SEEDS": towards})


def _examine_machine(config: AgentConfig, options: DoctorOptions) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    root = Path(options.root)
    machine = read_machine(root)
    request = plan_request(config.topology, requires_rdma=options.requires_rdma)
    made = plan(machine, request)
    problems, facts = made.problems, None
    if root == Path("/"):
        facts = read_facts()
        problems += judge(facts, pool_needs(config), made, requires_rdma=options.requires_rdma)
    if not options.is_json:
        sys.stdout.write(plan_text(machine, made))
        sys.stdout.write((facts_text(facts) if facts else "") + problems_text(problems))
    return as_values(machine, made, problems, facts), problems


async def _examine_pair(config: AgentConfig, peer: Seed) -> tuple[dict[str, Any], bool]:
    """The result of the canary, and whether it came through both ways."""
    one = Doctor(config, 0)
    one.start()
    try:
        info, from_there, from_here = await one.examine(peer.host, peer.port)
    except PeerUnavailableError as error:
        hint = "is  kvpeer doctor --listen  running there, with the same cluster and secret?"
        return {"peer": _address(peer.host, peer.port), "error": f"{error}; {hint}"}, False
    finally:
        await one.close()
    values: dict[str, Any] = {"peer": _address(peer.host, peer.port), "name": info.name, "error": ""}
    values |= {"from_there": asdict(from_there), "from_here": asdict(from_here)}
    return values, not (from_there.error or from_here.error)


async def _listen(config: AgentConfig, port: int) -> int:
    """Serves other doctors until it is told to stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    one = Doctor(config, port)
    one.start()
    info = one.info
    sys.stdout.write(f"listening: run  kvpeer doctor --pair {_address(info.host, info.control_port)}  elsewhere\n")
    sys.stdout.flush()
    await stop.wait()
    await one.close()
    return 0


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _pair_text(values: dict[str, Any]) -> str:
    if values["error"]:
        return f"canary to {values['peer']}\n  {values['error']}\n"
    ways = {"reading from there": values["from_there"], "reading from here": values["from_here"]}
    lines = [f"  {way}: {_way_text(CanaryResult(**result))}\n" for way, result in ways.items()]
    return f"canary to {values['name']} at {values['peer']}\n" + "".join(lines)


def _way_text(result: CanaryResult) -> str:
    if result.error:
        return f"failed, {result.error}"
    return f"{result.transport}, {result.latency_s * 1e6:.0f} us, {result.rate_bytes_per_s / 1e9:.2f} GB/s"
