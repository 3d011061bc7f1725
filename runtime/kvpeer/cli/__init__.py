"""The command line `kvpeer`."""

from kvpeer.cli.command import main

__all__ = ["main"]
