"""A real Prometheus for tests: scrapes given addresses once a second, evaluates kvpeer's rules, answers queries."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from engines.harness import eventually, free_port

__all__ = ["Prometheus"]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def program(name: str) -> str:
    """Where a program of Prometheus is: on the PATH, or where `make metrics-test` builds it."""
    found = shutil.which(name, path=os.pathsep.join([str(ROOT / "build" / "bin"), os.environ["PATH"]]))
    assert found, f"there is no {name}: run  make metrics-test  (it builds one)"
    return found


class Prometheus:
    """One process. targets: ports on this host by job."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[int]], rules: Path) -> None:
        self.port = free_port()
        self._n_targets = sum(map(len, targets.values()))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules / "*.yaml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
                for job, ports in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_scraping(self) -> None:
        """Returns when every target was scraped."""
        eventually(lambda: len(self._up()) == self._n_targets, "every target is scraped", DEADLINE_S, seen=self.log)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Raises AssertionError with Prometheus' own message."""
        result = self.get("query", query=expression)
        return [{"metric": {}, "value": result["result"]}] if result["resultType"] == "scalar" else result["result"]

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API. Raises OSError as long as it starts."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with _NO_PROXY.open(url, timeout=DEADLINE_S) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def log(self) -> str:
        """What it wrote last."""
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait(20)

    def _up(self) -> list[dict[str, Any]]:
        try:
            return self.query("up == 1")
        except OSError:
            return []
