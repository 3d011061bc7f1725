"""How hostile a run is, and how large: a profile is all that a run depends on besides its seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpeer.model import ConfigError

__all__ = ["PROFILES", "Profile", "profile_named"]


@dataclass(frozen=True, slots=True)
class Profile:
    """Times in virtual seconds, probabilities a frame, rates a second for the whole cluster."""

    name: str
    n_agents: int = 16
    hostile_s: float = 6.0
    """Faults and load. Then the network heals, what is stopped goes on, and the cluster has `quiet_s`."""
    quiet_s: float = 18.0
    """Until everything must agree: for members to agree, then the time for which a lost partition is kept (10 s), in
    which messages are sent again (5 s) and digests compared."""
    members_agree_s: float = 8.0
    """After the faults, until all must see the same members."""

    # ---- frames of the control channel
    delay_s_mean: float = 0.002
    lose: float = 0.01
    repeat: float = 0.01
    linger: float = 0.01
    """Frames that take up to `linger_s_max` and are overtaken by hundreds."""
    linger_s_max: float = 1.5
    garble: float = 0.002
    """Frames that are cut short, or whose header is changed: the connection ends."""

    # ---- faults, each at this rate while it is hostile
    crashes: float = 0.25
    """Killed; most start again at the same address with a new id."""
    freezes: float = 0.25
    partitions: float = 0.25
    resets: float = 0.5
    slow_hosts: float = 0.25
    leaves: float = 0.08
    liars: float = 0.2
    """Producers whose data server serves other bytes for some seconds, or owners that answer lookups wrongly."""
    scribbles: float = 0.3
    """Bytes of a committed page change under its header."""
    memory_shortages: float = 0.2
    engine_deaths: float = 0.3
    cohort_resets: float = 0.05
    clock_jumps: float = 0.0
    clock_stops: float = 0.0
    buggify: float = 0.1
    """Probability at each of the places in the wiring that delay or refuse on purpose."""

    # ---- load
    think_s_mean: float = 0.45
    """Between two requests of an engine."""
    n_chains: int = 30
    chain_pages_max: int = 8
    n_extents: int = 3


_STANDARD = Profile("standard")

PROFILES = {
    profile.name: profile
    for profile in (
        _STANDARD,
        replace(
            _STANDARD, name="calm", lose=0.0, repeat=0.0, linger=0.0, garble=0.0, crashes=0.0, freezes=0.0,
            partitions=0.0, resets=0.0, slow_hosts=0.0, leaves=0.0, liars=0.0, scribbles=0.0, memory_shortages=0.0,
            engine_deaths=0.0, cohort_resets=0.0, buggify=0.0,
        ),
        replace(_STANDARD, name="clocks", clock_jumps=0.6, clock_stops=0.4),
        replace(_STANDARD, name="partitions", partitions=0.5, lose=0.03, crashes=0.05, freezes=0.05),
        replace(_STANDARD, name="restarts", crashes=0.6, leaves=0.2, freezes=0.3),
        replace(_STANDARD, name="churn", n_extents=1, think_s_mean=0.15, scribbles=0.5, liars=0.4, crashes=0.05),
    )
}  # fmt: skip


def profile_named(name: str, n_agents: int | None = None, hostile_s: float | None = None) -> Profile:
    """The profile, with other sizes where they are given.

    Raises:
        ConfigError: there is no such profile, or a size makes no sense.
    """
    profile = PROFILES.get(name)
    if profile is None:
        raise ConfigError(f"there is no profile {name!r}: choose one of {', '.join(PROFILES)}")
    if n_agents is not None:
        if not 2 <= n_agents <= 256:
            raise ConfigError(f"a cluster of {n_agents} agents is not simulated: choose 2 to 256")
        profile = replace(profile, n_agents=n_agents)
    if hostile_s is not None:
        if not 0 < hostile_s < 1e6:
            raise ConfigError(f"{hostile_s:g} seconds cannot be simulated: choose more than 0")
        profile = replace(profile, hostile_s=hostile_s)
    return profile
