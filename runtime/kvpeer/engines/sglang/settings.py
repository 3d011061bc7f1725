"""Settings of the SGLang adapter: defaults < --hicache-storage-backend-extra-config < KVPEER_SGLANG_<SETTING>."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpeer.engines.options import read_options

__all__ = ["ENVIRONMENT_PREFIX", "Settings", "load_settings"]

ENVIRONMENT_PREFIX = "KVPEER_SGLANG_"

_KEYS_OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Of the same JSON object; SGLang takes its other keys out before a backend sees them."""

_MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """One setting a field; the name is the key in the extra config.

    SGLang puts no limit on a call and has one thread for each kind of call, so every later request waits behind a call
    that hangs. Hence the timeouts: what is not there by then is a miss.
    """

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

    def get_timeout_s(self, n_bytes: int) -> float:
        """Returns how long reading so many bytes may take."""
        return min(self.get_timeout_max_s, self.get_timeout_base_s + self.get_timeout_s_per_mib * n_bytes / _MIB)


def load_settings(extra_config: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Returns the effective settings.

    Raises:
        ConfigError: a key is unknown (the message names the nearest one) or a value does not fit.
    """
    own = {key: value for key, value in extra_config.items() if key not in _KEYS_OF_SGLANG}
    return read_options(Settings, own, "--hicache-storage-backend-extra-config", environment, ENVIRONMENT_PREFIX)
