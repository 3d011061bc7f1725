"""An agent whose membership fails some time after it began to serve: as `kvpeer agent`, with that one fault."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from kvpeer.agent.config import load
from kvpeer.agent.main import run
from kvpeer.agent.membership import MembershipService

FAILS_AFTER_S = 0.5


async def _fails(service: MembershipService) -> None:
    await asyncio.sleep(FAILS_AFTER_S)
    raise RuntimeError("a bug in the membership")


if __name__ == "__main__":
    MembershipService.run = _fails  # type: ignore[method-assign]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.exit(run(load(None, os.environ)))
