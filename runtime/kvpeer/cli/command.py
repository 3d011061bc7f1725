"""Parses the command line and runs the command.

What a command needs is imported when it runs: the base package stands alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kvpeer import AGENT_PACKAGES, __version__
from kvpeer.cli.chaos import add_command as add_chaos
from kvpeer.cli.doctor import add_doctor
from kvpeer.cli.explain import add_explain
from kvpeer.cli.sim import add_sim
from kvpeer.cli.status import add_status
from kvpeer.model import ConfigError

__all__ = ["main"]

EXIT_CONFIG = 2
"""The command line, a setting or the installation is wrong; the same call will fail again. argparse uses it too."""

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status; what is wrong with the configuration is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except ConfigError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in AGENT_PACKAGES:
            raise
        return _fail(f"the package {package} is missing: run  pip install 'kvpeer[agent]'")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpeer", description="LLM engines pull KV-cache pages from each other.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    agent = commands.add_parser("agent", help="run an agent until it is stopped")
    agent.add_argument("--config", metavar="FILE", help="YAML file; KVPEER_<GROUP>_<KEY> variables win over it")
    agent.add_argument("--print-config", action="store_true", help="print the settings in force and exit")
    agent.add_argument("--embedded", action="store_true", help="end some time after the last engine left")
    agent.set_defaults(run=_run_agent)

    add_chaos(commands)
    add_doctor(commands)
    add_explain(commands)
    bench = commands.add_parser("bench", help="measure what kvpeer costs, beside references")
    benchmarks = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    local = benchmarks.add_parser("local", help="this machine: copies, loopback tcp, locate, the agent's process")
    local.add_argument("--json", metavar="FILE", help="write the rows there as well (docs/benchmarks.md)")
    local.add_argument("--quick", action="store_true", help="few rounds: shows that it works, measures little")
    local.add_argument("--check", action="store_true", help="end with status 1 if a budget does not hold")
    local.set_defaults(run=_bench_local)
    peers = benchmarks.add_parser("peers", help="kvpeer beside other systems that move pages between processes")
    peers.add_argument("--json", metavar="FILE", help="write the report there as well (docs/benchmarks.md)")
    peers.add_argument("--plot", metavar="PNG", help="draw it there (needs kvpeer[bench])")
    peers.add_argument("--quick", action="store_true", help="few rounds: shows that it works, measures little")
    peers.add_argument("--check", action="store_true", help="end with status 1 if a budget does not hold")
    peers.add_argument(
        "--only", metavar="SYSTEM", action="append", default=[], help="measure this one; may be repeated"
    )
    peers.set_defaults(run=_bench_peers)
    add_sim(commands)
    add_status(commands)

    version = commands.add_parser("version", help="print the version of kvpeer and of its wire protocol")
    version.set_defaults(run=_print_version)
    return parser


def _run_agent(options: argparse.Namespace) -> int:
    from kvpeer.agent.config import effective, load

    config = load(options.config, os.environ)
    if options.print_config:
        sys.stdout.write(effective(config))
        return 0
    logging.basicConfig(
        level=config.agent.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _log.info("kvpeer %s starts with\n%s", __version__, effective(config))
    if config.security.mode == "insecure":
        _log.warning("security.mode is insecure: whoever reaches this agent can read and publish pages")

    from kvpeer.agent.main import run

    return run(config, is_embedded=options.embedded)


def _bench_local(options: argparse.Namespace) -> int:
    from kvpeer.bench.command import bench_local

    return bench_local(options.json, is_quick=options.quick, is_check=options.check)


def _bench_peers(options: argparse.Namespace) -> int:
    from kvpeer.bench.peers.command import bench_peers

    return bench_peers(options.json, options.plot, options.only, is_quick=options.quick, is_check=options.check)


def _print_version(_: argparse.Namespace) -> int:
    from kvpeer.wire.framing import WIRE_VERSION

    sys.stdout.write(f"kvpeer {__version__}, wire version {WIRE_VERSION}\n")
    return 0


def _fail(message: str) -> int:
    sys.stderr.write(f"kvpeer: {' '.join(message.split())}\n")
    return EXIT_CONFIG
