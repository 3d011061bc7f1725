"""`helm test` against engines that answer as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kvpeer_operator.sharing_check import ATTEMPTS, check, main


class Engine:
    """Decides for the reasons that the test says, one after the other."""

    def __init__(self, *reasons: str) -> None:
        self.prompts: list[list[int]] = []
        counts: dict[str, int] = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lines = [f'kvpeer_policy_decisions_total{{engine="0",reason="{r}"}} {n}.0' for r, n in counts.items()]
                models = json.dumps({"data": [{"id": "tiny"}]})
                self._answer(models if self.path == "/v1/models" else "\n".join(["# HELP x", *lines]))

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert asked["model"] == "tiny"
                engine.prompts.append(asked["prompt"])
                if reasons:
                    reason = reasons[min(len(engine.prompts), len(reasons)) - 1]
                    counts[reason] = counts.get(reason, 0) + 1
                self._answer("{}")

            def _answer(self, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def first() -> Iterator[Engine]:
    made = Engine("nothing_found")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("reasons", "n_prompts", "problem"),
    [
        (("pull",), 1, ""),
        (("nothing_found", "control", "pull"), 3, ""),
        (("mode_off",), ATTEMPTS, "mode_off"),
        ((), ATTEMPTS, "has it an agent"),
    ],
    ids=["pulls", "pulls the third", "is off", "has no agent"],
)
def test_it_passes_when_the_second_engine_pulls_and_says_else_what_it_decided(
    first: Engine, reasons: tuple[str, ...], n_prompts: int, problem: str
) -> None:
    second = Engine(*reasons)
    try:
        said = check(first.url, second.url, publish_s=0.0)
    finally:
        second.close()
    assert problem in said
    assert bool(said) == bool(problem)
    assert first.prompts == second.prompts
    assert len({tuple(each) for each in first.prompts}) == n_prompts


def test_its_status_says_how_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["http://127.0.0.1:1", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().out
