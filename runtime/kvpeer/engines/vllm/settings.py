"""Settings of the vLLM adapters: defaults < extra config < environment (KVPEER_CONNECTOR_<SETTING>)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpeer.core.policy import GuardSettings, Mode, PolicySettings
from kvpeer.engines.options import AUTO, calibration, floor_tokens, read_options
from kvpeer.engines.vllm.lanes import START_SHARE
from kvpeer.model import ConfigError

__all__ = ["ENVIRONMENT_PREFIX", "LIVE", "Settings", "load_settings"]

ENVIRONMENT_PREFIX = "KVPEER_CONNECTOR_"

LIVE = frozenset({"mode", "publish", "min_cached_token_delta", "load_timeout_s"})
"""What may change while the engine runs, by the cluster's operator."""

_MODES = tuple(mode.value for mode in Mode)


@dataclass(frozen=True)
class Settings:
    """One setting a field; the name is the key in kv_connector_extra_config, or in the tier's entry of its
    secondary_tiers."""

    mode: str = "on"
    """`on`: pull pages from peers. `shadow`: decide, count what pulls would have saved, and compute. `off`: publish,
    and reload the own pool only."""
    min_cached_token_delta: int | str = field(default=512, metadata={"words": (AUTO,)})
    """Fewer tokens than this are computed here rather than pulled from peers. `auto`: as few as pay by the measured
    costs, 512 as long as they are not known. The own pool is read whatever the number."""
    measured_costs: bool = True
    """Whether what pulls and prefills were measured to take has a say beside `min_cached_token_delta`. Without, that
    number alone decides, and the guard judges nothing."""
    margin: float = PolicySettings().margin
    """By this part computing must take longer than a pull that is made, once both are known."""
    guard: bool = True
    """Whether pulling is turned off, for a producer or altogether, while pulls take longer than computing would."""
    pulls_per_source_max: int = PolicySettings().pulls_per_source_max
    """Pulls that this engine has under way from one producer; beyond it another one is asked, or pages are
    computed."""
    calibrated_pull_s: float = 0.0
    """What a pull of next to nothing takes, as a calibration measured it. All four calibrated costs are given or
    none."""
    calibrated_pull_s_per_byte: float = 0.0
    """What each byte of a pull takes."""
    calibrated_prefill_s_per_token: float = 0.0
    """What computing a token takes, without attention."""
    calibrated_prefill_s_per_pair: float = 0.0
    """What attention from one token to another takes."""
    publish: bool = True
    """Whether this engine's pages go into the pool, for itself after eviction and for its peers."""
    lookup_timeout_s: float = 0.25
    """A request waits at most this long to learn where its pages are, then it is computed."""
    load_timeout_s: float = 5.0
    """A request waits at most this long for its pages, then what is missing is computed."""
    pull_base_s: float = PolicySettings().pull_base_s
    """A load may take this long, plus `pull_s_per_token` for each token. It waits for a thread for half as long at
    most, and both together are no longer than `load_timeout_s`."""
    pull_s_per_token: float = PolicySettings().pull_s_per_token
    """See `pull_base_s`. Waiting longer than computing the token takes would be worse than no load."""
    publish_timeout_s: float = 2.0
    """A page that is not in the pool this long after its copy began is given up."""
    deferred_requests_max: int = 64
    """Requests that wait for a lookup at one time; beyond it requests are computed at once."""
    publish_queue_pages_max: int = 4096
    """Pages that wait to be copied into the pool; beyond it pages are not published. Waiting pages hold engine
    blocks."""
    weights_identity: str = ""
    """Names the weights; equal on all engines that run them. Empty: taken from the checkpoint's content."""
    namespace_salt: str = ""
    """Engines with different salts never share pages."""
    engine_name: str = ""
    """Names this engine and its agent among those of the user on this host. Empty: the model's name and the lowest
    free number."""
    agent_socket: str = ""
    """The agent's Unix socket. Empty: this engine starts an agent of its own, or finds the one it started before."""

    def policy(self) -> PolicySettings:
        """Returns when pages are pulled."""
        return PolicySettings(
            mode=Mode(self.mode),
            min_cached_token_delta=floor_tokens(self.min_cached_token_delta),
            margin=self.margin,
            uses_costs=self.measured_costs,
            pulls_per_source_max=self.pulls_per_source_max,
            calibration=calibration(self),
            guard=GuardSettings(is_on=self.guard),
            pull_base_s=self.pull_base_s,
            pull_s_per_token=self.pull_s_per_token,
            max_pull_wait_s=self.load_timeout_s / (1 + START_SHARE),
        )


def load_settings(
    extra_config: Mapping[str, Any],
    environment: Mapping[str, str],
    extra_config_name: str = "kv_connector_extra_config",
) -> Settings:
    """Returns the effective settings. extra_config_name: what messages call `extra_config`.

    Raises:
        ConfigError: a key is unknown (the message names the nearest one) or a value does not fit.
    """
    settings = read_options(Settings, extra_config, extra_config_name, environment, ENVIRONMENT_PREFIX)
    if settings.mode not in _MODES:
        raise ConfigError(f"mode is {settings.mode!r}: use one of {', '.join(_MODES)}")
    return settings
