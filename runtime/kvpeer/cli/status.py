"""`kvpeer status`: the cluster as one of its agents and all that it knows see it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvpeer.cli.text import duration, indented, size, table
from kvpeer.model import ConfigError

__all__ = ["add_status", "status_text"]

EXIT_PROBLEMS = 1
"""Something is wrong that somebody can put right."""

ROWS_MAX = 20
"""Peers and decisions that are shown: those that matter most come first, --json has all."""

WHERE_MAX = 8
"""Agents that are named beside a problem of theirs."""

WATCH_S_MIN = 1.0
"""An agent makes a new status every two seconds."""

_CLEAR = "\x1b[H\x1b[2J"

_DESCRIPTION = """\
Show the members of the cluster, what their tiers hold, which engines share pages and why others do not, how reading
from peers goes, and what is wrong, each with its fix. Ends with status 1 if there is a problem; notes are none.
"""


def add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("status", help="show the cluster and what is wrong with it", description=_DESCRIPTION)
    parser.add_argument("--socket", default="", metavar="PATH", help="ask the agent there, and no other")
    parser.add_argument("--json", action="store_true", help="print values for programs")
    parser.add_argument(
        "--watch", metavar="SECONDS", type=float, nargs="?", const=2.0, help="again and again, until interrupted"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kvpeer.client.questions import ask
    from kvpeer.wire.messages import Inspect

    while True:
        try:
            report = ask(Inspect("status"), os.environ, options.socket)
        except ConfigError as error:
            if options.watch is None:
                raise
            sys.stdout.write(f"{_CLEAR if sys.stdout.isatty() else ''}{error}\n")
        else:
            text = json.dumps(report) if options.json else status_text(report)
            sys.stdout.write(f"{_CLEAR if options.watch is not None and sys.stdout.isatty() else ''}{text}\n")
        sys.stdout.flush()
        if options.watch is None:
            return EXIT_PROBLEMS if any(each["severity"] == "problem" for each in report["problems"]) else 0
        try:
            time.sleep(max(WATCH_S_MIN, options.watch))
        except KeyboardInterrupt:
            return 0


def status_text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    members = report["members"]
    names = {member["id"]: member["name"] for member in members}
    known = [(member["name"], member["status"]) for member in members if member["status"]]
    head = f"cluster {report['cluster']}, as agent {report['asked']['name']} sees it: {_counted(members)}"
    sections = [
        ("members", table(("name", "state", "host", "version", "up", "clients", "pool", "of", "pages", "disk"),
                          [_member(member) for member in members])),
        ("cohorts: engines that share pages", "\n".join(map(_cohort, report["cohorts"])) or "no engine has said hello"),
        ("peers: who reads from whom", _peers(known, names)),
        ("decisions of the last ten minutes", _decisions(known)),
        ("prefixes that most requests had in common", _prefixes(known)),
        ("problems", _problems(report["problems"])),
    ]  # fmt: skip
    return "\n\n".join([head, *[f"{title.upper()}\n{body}" for title, body in sections if body]])


def _counted(members: Sequence[Mapping[str, Any]]) -> str:
    states = [member["state"] for member in members]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _member(member: Mapping[str, Any]) -> list[str]:
    status = member["status"]
    if not status:
        return [member["name"], member["state"], member["host"], "no answer", *[""] * 6]
    pool, disk = status["tiers"]["pool"], status["tiers"]["disk"]
    held = f"{size(disk['used_bytes'])}, {disk['condition']}" if disk else "-"
    engines = sum(cohort["engines"] for cohort in status["cohorts"])
    return [
        member["name"], member["state"], member["host"], status["version"], duration(status["uptime_s"]), str(engines),
        size(pool["used_bytes"]), size(pool["capacity_bytes"]), str(pool["pages"]), held,
    ]  # fmt: skip


def _cohort(cohort: Mapping[str, Any]) -> str:
    agents = cohort["agents"]
    shown = ", ".join(agents[:ROWS_MAX]) + (f" and {len(agents) - ROWS_MAX} more" if len(agents) > ROWS_MAX else "")
    lines = [
        f"{cohort['namespace']}: {cohort['engines']} engine processes at {len(agents)} agents ({shown}), "
        f"{cohort['pages']} pages of {size(cohort['page_bytes'])}"
    ]
    if cohort["differing"]:
        lines.append(f"  shares nothing with {cohort['compared_with']}, because")
        for each in cohort["differing"]:
            lines.append(indented(f"{each['field']}: {each['here'] or 'nothing'}, there {each['there'] or 'nothing'}"))
            lines.append(indented(f"-> {each['fix']}", "    ", "       "))
    return "\n".join(lines)


def _peers(known: Sequence[tuple[str, Mapping[str, Any]]], names: Mapping[str, str]) -> str:
    """The failing ones first, then those that most was read from."""
    pairs = [(name, peer) for name, status in known for peer in status["peers"]]
    pairs.sort(key=lambda pair: (_health(pair[1]) == "ok", -pair[1]["bytes"]))
    rows = [
        [
            name, names.get(peer["id"], peer["id"][:8]), peer["transport"] or "-", size(peer["bytes"]),
            f"{size(peer['rate_bytes_per_s'])}/s" if peer["rate_bytes_per_s"] else "-",
            duration(peer["latency_s"]) if peer["latency_s"] else "-", str(peer["failed_pages"]), _health(peer),
        ]
        for name, peer in pairs[:ROWS_MAX]
    ]  # fmt: skip
    if not rows:
        return "nothing was read from a peer yet"
    more = f"\n{len(pairs) - ROWS_MAX} more; --json has all" if len(pairs) > ROWS_MAX else ""
    return table(("reader", "producer", "by", "read", "rate", "least", "failed", "health"), rows) + more


def _health(peer: Mapping[str, Any]) -> str:
    failing = [plane for plane, state in peer["breakers"].items() if state != "closed"]
    if failing:
        return f"{' and '.join(failing)}: failing"
    return "last fetch failed" if peer["error"] else "ok"


def _decisions(known: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    sums: dict[str, int] = {}
    for _, status in known:
        for reason, n in status["decisions"].items():
            sums[reason] = sums.get(reason, 0) + n
    rows = [[reason, str(n)] for reason, n in sorted(sums.items(), key=lambda each: -each[1])]
    return table(("reason", "requests"), rows) if rows else ""


def _prefixes(known: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    sums: dict[str, list[int]] = {}
    for _, status in known:
        for prefix in status["prefixes"]:
            counted = sums.setdefault(prefix["key"], [0, 0, 0])
            for place, n in enumerate((prefix["requests"], 1, prefix["fetched_pages"])):
                counted[place] += n
    hot = sorted(sums.items(), key=lambda each: -each[1][0])[:ROWS_MAX]
    rows = [[key, *map(str, counted)] for key, counted in hot]
    return table(("first page", "requests", "agents", "fetched pages"), rows) if rows else ""


def _problems(problems: Sequence[Mapping[str, Any]]) -> str:
    """Those that are the same at several agents once; problems before notes."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for each in sorted(problems, key=lambda each: each["severity"] != "problem"):
        what = each["severity"], each["name"], each["meaning"], each["fix"]
        grouped.setdefault(what, []).append(": ".join(filter(None, (each["agent"], each["subject"]))))
    return "\n".join(_problem(*what, where) for what, where in grouped.items()) or "none"


def _problem(severity: str, name: str, meaning: str, fix: str, where: Sequence[str]) -> str:
    more = f" and {len(where) - WHERE_MAX} more" if len(where) > WHERE_MAX else ""
    lines = [indented(f"{severity}: {name} ({'; '.join(where[:WHERE_MAX])}{more})", "", "  "), indented(meaning)]
    if fix:
        lines.append(indented(f"-> {fix}", "  ", "     "))
    return "\n".join(lines)
