"""The status page as an agent serves it; what a browser makes of it is tested in tests/browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import urllib.request
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from kvpeer.agent import status_page
from kvpeer.agent.status_page import status_pages
from whole_agents import WholeAgent, with_agents

NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str) -> tuple[dict[str, str], bytes]:
    with NO_PROXY.open(url, timeout=20) as answer:
        return dict(answer.headers), answer.read()


def test_an_agent_serves_the_page_and_what_it_shows(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def scenario(one: WholeAgent, other: WholeAgent) -> None:
        headers, page = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/")
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"<title>kvpeer</title>" in page
        headers, body = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/status.json")
        assert {member["name"] for member in json.loads(body)["members"]} == {"one", "other"}

    with_agents(tmp_path, "one other", scenario, one={"metrics.enabled": "true", "metrics.port": str(port)})


def nobody() -> Future[dict[str, Any]]:
    return Future()


def test_the_policy_allows_the_page_s_own_script_and_style_and_nothing_else() -> None:
    answer = status_pages(nobody)["/"]()
    html, policy = answer.body.decode(), answer.headers["Content-Security-Policy"]
    directives = dict(directive.split(" ", 1) for directive in policy.split("; "))
    assert directives["default-src"] == "'none'"
    for kind in ("script", "style"):
        (text,) = re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert directives[f"{kind}-src"] == f"'sha256-{digest}'"
    assert re.findall(r"(?:src|href)=\"(?!data:)", html) == []
    assert " style=" not in html
    assert " onclick" not in html


def test_an_agent_whose_loop_hangs_or_is_closed_is_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed() -> Future[dict[str, Any]]:
        raise RuntimeError("the loop is closed")

    monkeypatch.setattr(status_page, "STATUS_TIMEOUT_S", 0.01)
    assert status_pages(closed)["/status.json"]().status == 503
    assert status_pages(nobody)["/status.json"]().status == 503
