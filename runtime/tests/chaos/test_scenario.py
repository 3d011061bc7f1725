"""Scenario files: what they say, and faults that name the key."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from kvpeer.agent.config import load
from kvpeer.chaos.faults import Direction, Fault, FaultKind
from kvpeer.chaos.scenario import (
    FAULTS_MAX,
    Address,
    Route,
    Scenario,
    parse_address,
    parse_faults,
    parse_scenario,
    read_scenario,
)
from kvpeer.metrics.definitions import METRICS
from kvpeer.model import ConfigError

ROOT = Path(__file__).parents[3]

YAML = """
seed: 7
routes:
  - name: a-data
    listen: 10.0.0.7:7401
    to: 127.0.0.1:7401
    faults:
      - {kind: corrupt, probability: 0.001, direction: from_agent}
      - {kind: delay, delay_ms: 50, jitter_ms: 20}
      - {kind: freeze, from_s: 5, until_s: 8}
      - {kind: truncate, after_bytes: 100000}
  - {name: a-control, listen: "[::1]:7400", to: "[::1]:7500"}
"""

SCENARIO = Scenario(
    (
        Route(
            "a-data",
            Address("10.0.0.7", 7401),
            Address("127.0.0.1", 7401),
            (
                Fault(FaultKind.CORRUPT, Direction.FROM_AGENT, probability=0.001),
                Fault(FaultKind.DELAY, delay_ms=50, jitter_ms=20),
                Fault(FaultKind.FREEZE, from_s=5, until_s=8),
                Fault(FaultKind.TRUNCATE, after_bytes=100_000),
            ),
        ),
        Route("a-control", Address("::1", 7400), Address("::1", 7500)),
    ),
    seed=7,
)


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "s.yaml").write_text(YAML)
    (tmp_path / "s.json").write_text(json.dumps(yaml.safe_load(YAML)))
    assert read_scenario(str(tmp_path / "s.yaml")) == SCENARIO
    assert read_scenario(str(tmp_path / "s.json")) == SCENARIO


def route(**changed: object) -> dict:
    return {"name": "a", "listen": "127.0.0.1:0", "to": "127.0.0.1:1", **changed}


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        ([], "the scenario must hold `key: value` lines"),
        ({"seed": 1}, "routes is missing"),
        ({"routes": []}, "routes is empty"),
        ({"routes": {}}, "routes must be a list"),
        ({"routes": [route()], "sed": 1}, "unknown key sed; did you mean seed?"),
        ({"routes": [route(zzz=1)]}, "unknown key routes[0].zzz; there are name, listen, to, faults"),
        ({"routes": [route(), route()]}, "routes: two are named 'a'"),
        ({"routes": [{"name": "a", "to": "127.0.0.1:1"}]}, "routes[0].listen is missing"),
        ({"routes": [route(name="a/b")]}, "routes[0].name is 'a/b'"),
        (
            {"routes": [route(to="node1:7400")]},
            "routes[0].to is 'node1:7400', but must be a numeric address",
        ),
        ({"routes": [route(to="127.0.0.1:0")]}, "routes[0].to is 127.0.0.1:0, but must name the port"),
        ({"routes": [route(listen="127.0.0.1:99999")]}, "routes[0].listen is '127.0.0.1:99999'"),
        ({"routes": [route()], "seed": -1}, "seed is -1"),
        ({"routes": [route()], "seed": "x"}, "seed is 'x', but must be a whole number"),
        (
            {"routes": [route(faults=[{"kind": "rest"}])]},
            "routes[0].faults[0].kind is 'rest', but must be one of",
        ),
        ({"routes": [route(faults=[{}])]}, "routes[0].faults[0].kind is missing"),
        (
            {"routes": [route(faults=[{"kind": "freeze"}, {"kind": "reset", "probabilty": 1}])]},
            "unknown key routes[0].faults[1].probabilty; did you mean probability?",
        ),
        (
            {"routes": [route(faults=[{"kind": "reset", "probability": "1%"}])]},
            "routes[0].faults[0].probability is '1%', but must be a number",
        ),
        (
            {"routes": [route(faults=[{"kind": "reset", "probability": 2}])]},
            "routes[0].faults[0].probability is 2.0, but must be from",
        ),
        (
            {"routes": [route(faults=[{"kind": "reset", "after_bytes": 1.5}])]},
            "routes[0].faults[0].after_bytes is 1.5, but must be a whole number",
        ),
        (
            {"routes": [route(faults=[{"kind": "freeze"}] * (FAULTS_MAX + 1))]},
            f"routes[0].faults has {FAULTS_MAX + 1} items, but at most {FAULTS_MAX}",
        ),
    ],
)
def test_a_faulty_scenario_is_refused_and_the_key_named(tree: object, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(tree)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("s.yaml", "routes: [", "s.yaml is not YAML"),
        ("s.json", "{", "s.json is not JSON"),
        ("s.yaml", "routs: []", "s.yaml: unknown key routs; did you mean routes?"),
        ("s.yaml", "#" * (1 << 21), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_scenario_is_refused_by_name(tmp_path: Path, name: str, text: str, fault: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_scenario(str(tmp_path / name))
    assert fault in str(caught.value)


def test_yaml_without_its_package_names_the_extra_and_json_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "s.yaml").write_text(YAML)
    (tmp_path / "s.json").write_text(json.dumps({"routes": [route()]}))
    with pytest.raises(ConfigError, match=r"pip install 'kvpeer\[chaos\]'"):
        read_scenario(str(tmp_path / "s.yaml"))
    assert read_scenario(str(tmp_path / "s.json")).routes[0].name == "a"


def test_faults_alone_are_read_as_in_a_scenario() -> None:
    assert parse_faults([{"kind": "freeze", "direction": "to_agent"}]) == (Fault(FaultKind.FREEZE, Direction.TO_AGENT),)
    assert parse_faults([]) == ()


def test_an_address_reads_as_it_is_written() -> None:
    for text in ("10.0.0.7:7400", "[fd00::7]:7400"):
        assert str(parse_address(text, "--to")) == text


def test_the_page_for_operators_has_a_scenario_settings_and_metrics_that_exist(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "chaos.md").read_text()
    agent, scenario = (block.split("```")[0] for block in page.split("```yaml\n")[1:])
    for name, text in (("agent.yaml", agent), ("scenario.yaml", scenario)):
        (tmp_path / name).write_text(text)
    assert load(tmp_path / "agent.yaml", {}).agent.advertise_control_port == 7400
    assert [route.name for route in read_scenario(str(tmp_path / "scenario.yaml")).routes] == ["control", "data"]
    commands = re.findall(r"'(\[.*\])'", page)
    assert all(isinstance(parse_faults(json.loads(faults)), tuple) for faults in commands)
    assert len(commands) >= 4
    named = set(re.findall(r"`(kvpeer_\w+)", page))
    assert len(named) > 5
    assert named <= {metric.name for metric in METRICS}
