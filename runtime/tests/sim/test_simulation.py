"""Whole clusters under faults: a few seeds of each profile, and that a seed says all there is to say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kvpeer.cli import main
from kvpeer.core.directory import PREVIOUS_OWNER_S
from kvpeer.model import ConfigError
from kvpeer.sim import PROFILES, profile_named, simulate
from kvpeer.sim.faults import OUTAGE_S_MAX
from kvpeer.sim.run import REPORTS_S

from sim.mutants import ring_off_by_one

RUNTIME = Path(__file__).parents[2]
SMALL = profile_named("standard", n_agents=5, hostile_s=3.0)


@pytest.mark.parametrize("name", PROFILES)
def test_a_cluster_keeps_its_promises(name):
    result = simulate(1, profile_named(name, n_agents=8))
    assert result.violations == ()


def test_a_seed_repeats_event_for_event_and_another_one_does_not():
    first, again, other = (simulate(seed, SMALL) for seed in (5, 5, 6))
    assert first == again
    assert first.digest != other.digest


def test_a_seed_repeats_in_processes_that_hash_differently():
    command = [
        sys.executable,
        "-m",
        "kvpeer.cli",
        "sim",
        "cluster",
        "--agents",
        "4",
        "--minutes",
        "0.03",
        "--seed",
        "9",
    ]

    def run(hash_seed: str) -> str:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(RUNTIME), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=True)
        return done.stdout[: done.stdout.index("1 seeds of")]

    first = run("1")
    assert "seed 9: green, digest " in first
    assert run("2") == first


@pytest.mark.parametrize("name", PROFILES)
def test_what_an_agent_that_comes_back_late_moved_is_settled_when_the_directory_is_checked(name):
    profile = profile_named(name)
    assert profile.quiet_s - REPORTS_S > OUTAGE_S_MAX + PREVIOUS_OWNER_S


@pytest.mark.long
def test_the_simulation_is_as_hostile_as_it_says():
    """A cluster without trouble would prove nothing."""
    counts = sum((simulate(seed, profile_named("standard", n_agents=10)).counts for seed in range(3)), Counter())
    for kind in ("crash", "freeze", "partition", "reset", "slow", "kill", "lie", "scribble"):
        assert counts[kind] > 0, kind
    assert counts["loaded"] > 50
    assert counts["published"] > 50


def test_a_failing_seed_is_printed_with_the_command_that_shows_it_again(monkeypatch, capsys):
    ring_off_by_one(monkeypatch)
    status = main(["sim", "cluster", "--agents", "4", "--profile", "calm", "--seeds", "2", "--trace", "3"])
    out = capsys.readouterr().out
    assert status == 1
    failed = next(line for line in out.splitlines() if "FAILED" in line)
    seed = failed.split()[1].rstrip(":")
    assert f"replay: kvpeer sim cluster --agents 4 --profile calm --seed {seed}" in out
    assert "an owner's records are not the producer's" in out

    assert main(["sim", "cluster", "--agents", "4", "--profile", "calm", "--seed", seed, "--trace", "0"]) == 1
    assert failed in capsys.readouterr().out


def test_a_green_run_says_how_much_was_simulated(capsys):
    assert main(["sim", "cluster", "--agents", "3", "--minutes", "0.02", "--seeds", "1", "--profile", "calm"]) == 0
    assert "1 seeds of 3 agents, profile calm: 0 failed; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--profile", "mild"], "there is no profile 'mild': choose one of standard"),
        (["--agents", "1"], "a cluster of 1 agents is not simulated: choose 2 to 256"),
        (["--minutes", "0"], "0 seconds cannot be simulated"),
        (["--seeds", "0"], "--seeds and --jobs must be at least 1"),
    ],
)
def test_a_wrong_option_is_named(arguments, fault, capsys):
    assert main(["sim", "cluster", *arguments]) == 2
    assert fault in capsys.readouterr().err


def test_an_unknown_profile_is_a_config_error():
    with pytest.raises(ConfigError):
        profile_named("mild")
