"""Runs a program under a seccomp filter that refuses some system calls with EPERM, as the default profiles of container
runtimes do: `python seccomp.py mbind,move_pages PROGRAM ARGUMENTS`."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from kvpeer.agent.numa import _NUMBERS

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _EPERM = 0x7FFF0000, 0x00050000 | 1
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_SETAFFINITY = {"x86_64": 203, "aarch64": 122}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(names: list[str]) -> None:
    """From now on this process, and what it becomes, cannot make these calls."""
    machine = os.uname().machine
    numbers = {**_NUMBERS[machine], "sched_setaffinity": _SETAFFINITY[machine]}
    steps = [(_LOAD, 0, 0, 0)]
    for idx, name in enumerate(names):
        steps.append((_EQUAL, len(names) - idx, 0, numbers[name]))
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) == 0


if __name__ == "__main__":
    refuse(sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
