"""What `helm test` runs: one prompt, first through one engine, then through another, which has to pull what the first
computed.

    python -m kvpeer_operator.sharing_check http://ENGINE-1:8000 http://ENGINE-2:8000
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import Sequence

__all__ = ["check", "main"]

PROMPT_TOKENS = 1024
"""Twice the default floor of a policy. Token ids, so that no tokenizer is needed; low ones, which every model has."""
TOKEN_IDS = (10, 200)

ATTEMPTS = 5
"""Prompts that are tried: what the first engine publishes is found by others a moment later, and an engine that has
measured what pulls take now and then computes a prompt to learn what that takes."""
PUBLISH_S = 2.0
REQUEST_DEADLINE_S = 120.0

_PULLS = re.compile(r'^kvpeer_policy_decisions_total\{.*reason="(\w+)".*\} ([0-9.e+]+)$', re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 if the second engine pulled."""
    if len(arguments) != 2:
        print("give the addresses of two engines of one cluster: --set 'test.engines={http://A:8000,http://B:8000}'")
        return 2
    try:
        first, second = arguments
        problem = check(first, second)
    except OSError as error:
        problem = f"an engine does not answer: {error}"
    print(problem or "the second engine pulled what the first one computed")
    return 1 if problem else 0


def check(first: str, second: str, publish_s: float = PUBLISH_S) -> str:
    """Why the second engine does not pull what the first one computed; empty: it does. Raises OSError."""
    decided: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        prompt = [random.randint(*TOKEN_IDS) for _ in range(PROMPT_TOKENS)]  # noqa: S311 - one that nobody had before
        before = _decisions(second)
        _complete(first, prompt)
        time.sleep(publish_s)
        _complete(second, prompt)
        decided = {reason: n - before.get(reason, 0.0) for reason, n in _decisions(second).items()}
        if decided.get("pull", 0.0) + decided.get("probe", 0.0) > 0:
            return ""
    reasons = ", ".join(sorted(reason for reason, n in decided.items() if n > 0)) or "nothing: has it an agent?"
    return f"the second engine pulled nothing; it decided: {reasons} (docs/policy.md says what that means)"


def _complete(engine: str, prompt: list[int]) -> None:
    model = json.loads(_open(f"{engine}/v1/models"))["data"][0]["id"]
    asked = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    _open(f"{engine}/v1/completions", json.dumps(asked).encode())


def _decisions(engine: str) -> dict[str, float]:
    counts: dict[str, float] = {}
    for reason, n in _PULLS.findall(_open(f"{engine}/metrics")):
        counts[reason] = counts.get(reason, 0.0) + float(n)
    return counts


def _open(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - the installer's
    with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
