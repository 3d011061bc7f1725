"""Settings of the SGLang adapter: defaults < --hicache-storage-backend-extra-config < KVPEER_SGLANG_<SETTING>."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpeer.core.policy import Mode, PolicySettings
from kvpeer.engines.options import AUTO, calibration, floor_tokens, read_options
from kvpeer.model import ConfigError

__all__ = ["ENVIRONMENT_PREFIX", "LIVE", "Settings", "load_settings"]

ENVIRONMENT_PREFIX = "KVPEER_SGLANG_"

LIVE = frozenset({"mode", "get_timeout_max_s"})
"""What may change while the engine runs, by the cluster's operator."""

_KEYS_OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Of the same JSON object; SGLang takes its other keys out before a backend sees them."""

_MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """One setting a field; the name is the key in the extra config.

    SGLang puts no limit on a call and has one thread for each kind of call, so every later request waits behind a call
    that hangs. Hence the timeouts: what is not there by then is a miss.
    """

    mode: str = "on"
    """`on`: pages at peers can be read. `shadow`: count what reading them would have saved, and hide them. `off`: hide
    them. The own pool can be read in any case."""
    min_cached_token_delta: int | str = field(default=1, metadata={"words": (AUTO,)})
    """Fewer tokens at peers than this are hidden; SGLang itself asks for no fewer than its prefetch threshold. `auto`:
    as few as pay by the calibrated costs, 512 without."""
    margin: float = PolicySettings().margin
    """By this part computing must take longer than a pull that is made, by the calibrated costs."""
    calibrated_pull_s: float = 0.0
    """What a pull of next to nothing takes, as a calibration measured it. All four calibrated costs are given or
    none."""
    calibrated_pull_s_per_byte: float = 0.0
    """What each byte of a pull takes, in bytes of one rank."""
    calibrated_prefill_s_per_token: float = 0.0
    """What computing a token takes, without attention."""
    calibrated_prefill_s_per_pair: float = 0.0
    """What attention from one token to another takes."""
    exists_timeout_s: float = 0.15
    """A question where pages are may take this long, however many pages and pools it is about."""
    get_timeout_base_s: float = 0.25
    """Reading pages may take this long, plus `get_timeout_s_per_mib` for what is to be read, and no longer than
    `get_timeout_max_s`."""
    get_timeout_s_per_mib: float = 0.004
    """See `get_timeout_base_s`. A quarter of what a network of 10 Gbit/s gives."""
    get_timeout_max_s: float = 3.0
    """See `get_timeout_base_s`. Below the 10 s after which SGLang gives up to end a thread."""
    set_timeout_s: float = 2.0
    """Pages that are not in the pool this long after the call began are given up."""
    weights_identity: str = ""
    """Names the weights, and the LoRA adapters of --lora-paths; equal on all engines that run them. Empty: taken from
    the checkpoint's content."""
    namespace_salt: str = ""
    """Engines with different salts never share pages."""
    engine_name: str = ""
    """Names this engine and its agent among those of the user on this host. Empty: the model's name and the server's
    port."""
    agent_socket: str = ""
    """The agent's Unix socket. Empty: this engine starts an agent of its own, or finds the one it started before."""

    def policy(self) -> PolicySettings:
        """Returns when pages at peers are told of. Reads have their own timeouts."""
        return PolicySettings(
            mode=Mode(self.mode),
            min_cached_token_delta=floor_tokens(self.min_cached_token_delta),
            margin=self.margin,
            calibration=calibration(self),
        )

    def get_timeout_s(self, n_bytes: int) -> float:
        """Returns how long reading so many bytes may take."""
        return min(self.get_timeout_max_s, self.get_timeout_base_s + self.get_timeout_s_per_mib * n_bytes / _MIB)


def load_settings(extra_config: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Returns the effective settings.

    Raises:
        ConfigError: a key is unknown (the message names the nearest one) or a value does not fit.
    """
    own = {key: value for key, value in extra_config.items() if key not in _KEYS_OF_SGLANG}
    settings = read_options(Settings, own, "--hicache-storage-backend-extra-config", environment, ENVIRONMENT_PREFIX)
    modes = tuple(mode.value for mode in Mode)
    if settings.mode not in modes:
        raise ConfigError(f"mode is {settings.mode!r}: use one of {', '.join(modes)}")
    return settings
