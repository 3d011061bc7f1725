"""From the codes of the C API to the errors of `kvpeer.model`."""

from __future__ import annotations

import os
from enum import IntEnum

from kvpeer.model import (
    AdmissionRefusedError,
    CapacityError,
    ConfigError,
    InternalError,
    KvPeerError,
    LocalProtocolError,
    PeerUnavailableError,
    RemoteProtocolError,
)
from kvpeer.native._library import library

__all__ = ["Code", "check", "error_for"]


class Code(IntEnum):
    """Return codes. Values equal enum kvp_error."""

    OK = 0
    EINVAL = -1
    ENOMEM = -2
    ESYS = -3
    ETIMEOUT = -4
    ECLOSED = -5
    EREFUSED = -6
    EPROTO = -7
    EFULL = -8
    ENODEVICE = -9


_MEANING: dict[Code, tuple[type[KvPeerError], str]] = {
    Code.EINVAL: (LocalProtocolError, "an argument breaks the contract of the native call"),
    Code.ENOMEM: (CapacityError, "memory or address space is exhausted"),
    Code.ETIMEOUT: (PeerUnavailableError, "the deadline passed"),
    Code.ECLOSED: (PeerUnavailableError, "the connection is closed"),
    Code.EREFUSED: (AdmissionRefusedError, "the other side refused the capability"),
    Code.EPROTO: (RemoteProtocolError, "the other side broke the protocol"),
    Code.EFULL: (CapacityError, "a limit is reached"),
    Code.ENODEVICE: (ConfigError, "this machine has no usable RDMA device"),
}


def error_for(code: int, action: str, system_error: type[KvPeerError] = ConfigError) -> KvPeerError:
    """Returns the error that says why `action` failed; of kind `system_error` if a system call did."""
    if code == Code.ESYS:
        return system_error(f"{action}: {os.strerror(library().kvp_last_errno())}")
    if code not in _MEANING:
        return InternalError(f"{action}: the native library returned {code}")
    kind, meaning = _MEANING[Code(code)]
    return kind(f"{action}: {meaning}")


def check(code: int, action: str, system_error: type[KvPeerError] = ConfigError) -> int:
    """Returns a code that is not negative; raises `error_for` otherwise."""
    if code < 0:
        raise error_for(code, action, system_error)
    return code
