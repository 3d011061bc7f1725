"""Grafana's own types take the dashboards (`make schema-test`, which installs them with npm). They say nothing of the
options of each kind of panel."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kvpeer_dashboards.expressions import DASHBOARDS

pytestmark = pytest.mark.schema

MODULES = Path(__file__).parents[2] / "build" / "schema" / "node_modules"

HEAD = "import { type Dashboard, ThresholdsMode } from '@grafana/schema';\nconst dashboard: Dashboard = "
OPTIONS = (
    "--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext",
    "--target", "es2022",
)  # fmt: skip


def _compiled(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    # A literal is not a member of an enum for TypeScript, whatever JSON would say.
    typed = text.replace('"mode": "absolute"', '"mode": ThresholdsMode.Absolute')
    path.write_text(f"{HEAD}{typed};\nexport default dashboard;\n")
    (path.parent / "node_modules").symlink_to(MODULES)
    command = [str(MODULES / ".bin" / "tsc"), *OPTIONS, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    assert MODULES.exists(), "Grafana's types are not installed: run  make schema-test"


@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_dashboard_is_of_grafanas_type(path: Path, tmp_path: Path) -> None:
    run = _compiled(tmp_path / "dashboard.ts", path.read_text())
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [('"uid": "${datasource}"', '"uid": 7'), ('"x": 0', '"x": "left"'), ('"title"', '"titel"')],
    ids=["datasource", "place", "unknown field"],
)
def test_what_is_not_of_the_type_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    text = (DASHBOARDS / "kvpeer-fleet.json").read_text()
    assert right in text
    assert _compiled(tmp_path / "dashboard.ts", text.replace(right, wrong)).returncode != 0
