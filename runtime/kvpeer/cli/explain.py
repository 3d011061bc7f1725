"""`kvpeer explain`: why a request, a page or a prompt hit or did not."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpeer.cli.text import duration, indented, size, table
from kvpeer.model import ConfigError

if TYPE_CHECKING:
    from kvpeer.wire.messages import Inspect

__all__ = ["add_explain", "explained"]

EXIT_UNKNOWN = 1
"""Nobody knows anything of it."""

_DESCRIPTION = """\
Say what became of a request: who held what, what was decided and why, what moved, how long each step took, what was
verified, and why what missed missed. Asks an agent at its socket, which asks the other agents. Works as long as the
request is among the last 4096 of its agent. Ends with status 1 if nobody knows of it.
"""


def add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("explain", help="say why a request did not hit", description=_DESCRIPTION)
    parser.add_argument(
        "subject", nargs="?", default="", metavar="REQUEST|KEY",
        help="id of a request, or a beginning of it; or key of a page: its first 8 hex digits, or all 32",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", metavar="FILE", help="a JSON list of token ids: who holds this prompt's pages"
    )
    parser.add_argument(
        "--namespace", default="", metavar="HEX", help="beginning of the namespace that the prompt is for"
    )
    parser.add_argument("--socket", default="", metavar="PATH", help="ask the agent there, and no other")
    parser.add_argument("--json", action="store_true", help="print values for programs")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kvpeer.client.questions import ask

    report = ask(_question(options), os.environ, options.socket)
    sys.stdout.write(f"{json.dumps(report, indent=2) if options.json else explained(report)}\n")
    is_known = any(agent["traces"] or agent["holds"] for agent in report["agents"])
    return 0 if is_known else EXIT_UNKNOWN


def _question(options: argparse.Namespace) -> Inspect:
    from kvpeer.wire.messages import SUBJECT_CHARS_MAX, Inspect

    if bool(options.subject) == bool(options.prompt_tokens):
        raise ConfigError("explain takes a request's id or a page's key, or --prompt-tokens FILE")
    if options.prompt_tokens:
        return _prompt_question(options)
    return Inspect("explain", options.subject[:SUBJECT_CHARS_MAX])


def _prompt_question(options: argparse.Namespace) -> Inspect:
    from kvpeer.client.questions import ask
    from kvpeer.core.block_hashes import ALGORITHMS, block_hashes
    from kvpeer.wire.messages import INSPECTED_PAGES_MAX, Inspect

    tokens = _tokens(options.prompt_tokens)
    cohorts = ask(Inspect("status"), os.environ, options.socket)["cohorts"]
    described = [each for each in cohorts if each["description"] and each["namespace"].startswith(options.namespace)]
    if not described:
        known = ", ".join(each["namespace"] for each in cohorts) or "none"
        raise ConfigError(f"no engine has a namespace {options.namespace}...: those in use are {known}")
    fields = described[0]["description"]
    algorithm, _, seed = fields.get("hash", "").partition(":")
    if fields.get("engine") != "vllm" or algorithm not in ALGORITHMS or not fields.get("page_tokens", "").isdecimal():
        raise ConfigError(
            f"pages of namespace {described[0]['namespace']} are not hashed in a way that is known here: "
            f"--prompt-tokens works for vLLM with {' or '.join(ALGORITHMS)}; ask by the request's id instead"
        )
    hashes = block_hashes(tokens, int(fields["page_tokens"]), algorithm, seed)[:INSPECTED_PAGES_MAX]
    if not hashes:
        raise ConfigError(
            f"{len(tokens)} tokens do not fill a page of {fields['page_tokens']}: there is nothing to share"
        )
    return Inspect("prompt", described[0]["namespace"], b"".join(hashes))


def _tokens(path: str) -> list[int]:
    try:
        tokens = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompt-tokens {path} cannot be read: {error}") from error
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 63 for token in tokens):
        raise ConfigError(f"--prompt-tokens {path} must be a JSON list of token ids, as a tokenizer gives them")
    return tokens


# ---- as text


def explained(report: Mapping[str, Any]) -> str:
    """The report for people."""
    names = report["names"]
    parts = [_trace(trace, agent, names) for agent in report["agents"] for trace in agent["traces"]]
    if report["keys"] or any(agent["holds"] for agent in report["agents"]):
        parts.append(_holdings(report))
    elif not parts:
        parts.append(
            f"nobody knows of {report['subject'] or 'it'}: agents keep the last 4096 requests since they started, and"
            " requests that were not finished a second ago may not have been told yet"
        )
    if report["silent"]:
        parts.append(f"no answer from {', '.join(names.get(who, who) for who in report['silent'])}")
    return "\n\n".join(parts)


def _holdings(report: Mapping[str, Any]) -> str:
    rows = [
        [agent["name"] or agent["id"], f"{held['pool']}", f"{held['disk']}", f"{held['leading']} of {held['pages']}"]
        for agent in report["agents"]
        if (held := agent["holds"])
    ]
    if not rows:
        return f"none of these {report['keys']} pages is held by any agent"
    return "held at this moment\n" + table(("agent", "in its pool", "on its disk", "first in a row"), rows)


def _trace(trace: Mapping[str, Any], agent: Mapping[str, Any], names: Mapping[str, str]) -> str:
    asked, decision = trace["asked"], trace["decision"]
    lines = [
        f"request {trace['request']}, at agent {agent['name'] or agent['id']}, {duration(trace['age_s'])} ago, "
        f"namespace {trace['namespace']}",
        f"  {trace['summary']}",
        "",
    ]
    if "prompt_tokens" in asked:
        lines.append(
            f"who had what: of {asked['prompt_tokens']} tokens the engine {asked['engine_tokens']}, the own pool "
            f"{asked['own_pool_tokens']} more, peers {asked['peer_tokens']} more"
        )
    lines += [f"  {_name(names, who['agent'])} {_reach(who)}" for who in trace["holders"]]
    if decision is not None:
        lines += ["", f"decided: {decision['reason']}", indented(decision["meaning"]), *_estimates(decision, names)]
    lines += ["", "steps", *_steps(trace, names)]
    if trace["moved"]:
        lines += ["", "moved", *[f"  {_moved(move, names)}" for move in trace["moved"]]]
    counts = {name: n for name, n in trace["verified"].items() if name != "mode" and n}
    if counts:
        told = ", ".join(f"{n} {name}" for name, n in counts.items())
        lines += ["", f"verified ({trace['verified']['mode']}): parts of pages by outcome: {told}"]
    if trace["reasons"]:
        lines += ["", "why what is missing is", *[_reason(each) for each in trace["reasons"]]]
    return "\n".join(lines)


def _name(names: Mapping[str, str], agent_id: str) -> str:
    return f"{names.get(agent_id, 'a member that left')} ({agent_id[:8]})"


def _reach(who: Mapping[str, Any]) -> str:
    if "reaches_tokens" in who:
        return f"with its pages the prefix reaches {who['reaches_tokens']} tokens"
    return f"offered the first {who['reaches_pages']} pages"


def _estimates(decision: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    lines = []
    if decision["wanted_tokens"]:
        source = f" from {_name(names, decision['source'])}" if decision["source"] else ""
        wait = f", waiting {duration(decision['wait_s'])} at most" if decision["wait_s"] else ""
        lines.append(f"  wanted {decision['wanted_tokens']} tokens{source}{wait}")
    if estimates := decision["estimates"]:
        known = "measured" if estimates["are_known"] else "not known well yet"
        lines.append(
            f"  estimated ({known}): a pull {duration(estimates['pull_s'])} +- "
            f"{duration(estimates['pull_deviation_s'])}, computing {duration(estimates['prefill_s'])}"
        )
    return lines


def _steps(trace: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    rows = []
    for step in trace["steps"]:
        if step["step"] == "locate":
            detail = f"{step['own_pool']} pages in the own pool, {step['peers']} at peers, {step['missing']} nowhere"
        elif step["step"] == "pull":
            detail = f"from {_name(names, step['agent'])} by {step['transport']}, {step['calls']} fetches"
        elif step["step"] == "fetch":
            detail = f"{step['calls']} calls of ranks, {duration(step['busy_s'])} in all"
        else:
            detail = ""
        rows.append([f"+{duration(step['at_s'])}", step["step"], duration(step["seconds"]), detail])
    if (outcome := trace["outcome"]) and outcome["load_s"]:
        rows.append(["", "load", duration(outcome["load_s"]), f"{outcome['loaded_tokens']} tokens, the slowest rank"])
    return [f"  {line}" for line in table(("at", "step", "took", "what"), rows).splitlines()] if rows else ["  none"]


def _moved(move: Mapping[str, Any], names: Mapping[str, str]) -> str:
    rate = f", {size(move['bytes'] / move['seconds'])}/s" if move["seconds"] else ""
    failed = {name: move[name] for name in ("miss", "stale", "corrupt", "timeout", "refused") if move[name]}
    lost = "".join(f", {n} {name}" for name, n in failed.items())
    error = f" ({move['error']})" if move["error"] else ""
    moved = f"{move['hit']} pages, {size(move['bytes'])} by {move['transport']} in {duration(move['seconds'])}{rate}"
    return f"{_name(names, move['agent'])}: {moved}{lost}{error}"


def _reason(reason: Mapping[str, Any]) -> str:
    n = f" ({reason['pages']} pages)" if reason["pages"] else ""
    lines = [f"  {reason['reason']}{n}", indented(reason["meaning"], "    ", "    ")]
    if reason["fix"]:
        lines.append(indented(f"-> {reason['fix']}", "    ", "       "))
    return "\n".join(lines)
