"""The status page: one static file at `/`, and what it shows at `/status.json`.

The page loads nothing else and runs nothing but its own script and style, which the policy names by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from importlib import resources
from types import MappingProxyType
from typing import Any

from kvpeer.agent.http import HttpAnswer, Page

__all__ = ["content_policy", "status_pages"]

STATUS_TIMEOUT_S = 4.0
"""An agent gives its peers three seconds."""

_BLOCK = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

_COMMON = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def status_pages(report: Callable[[], Future[dict[str, Any]]]) -> Mapping[str, Page]:
    """By path, for an HttpEndpoint. report: asks for a status of the cluster; may be called on any thread."""
    html = resources.files("kvpeer.agent").joinpath("status.html").read_text(encoding="utf-8")
    headers = {**_COMMON, "Content-Security-Policy": content_policy(html), "X-Frame-Options": "DENY"}
    page = HttpAnswer("text/html; charset=utf-8", html.encode(), MappingProxyType(headers))
    return {"/": lambda: page, "/status.json": lambda: _status(report)}


def content_policy(html: str) -> str:
    """What a browser may do for this page: run the script and the style that are in it, and ask where it came from."""
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _BLOCK.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(digests['script'])}; style-src {' '.join(digests['style'])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _status(report: Callable[[], Future[dict[str, Any]]]) -> HttpAnswer:
    try:
        status = report().result(STATUS_TIMEOUT_S)
    except (FutureTimeoutError, RuntimeError):  # the event loop hangs, or is closed
        return HttpAnswer("text/plain; charset=utf-8", b"the agent does not answer\n", _COMMON, 503)
    return HttpAnswer("application/json", json.dumps(status, separators=(",", ":")).encode(), _COMMON)
