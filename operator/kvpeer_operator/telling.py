"""Posts words to agents, many at once. The only module that talks to them."""

from __future__ import annotations

import http
import http.client
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvpeer_operator.reconcile import Word

__all__ = ["post_words"]

DEADLINE_S = 2.0
"""To connect, and for the answer. An agent answers in milliseconds; one that does not is told later."""

AT_ONCE_MAX = 16
"""Agents that are told at the same time: a cluster of a hundred whose nodes are all cut off holds up others for no more
than a few times DEADLINE_S, and then for longer and longer not at all."""


def post_words(words: Sequence[Word]) -> list[bool]:
    """Which of the agents took their words. Blocks."""
    if not words:
        return []
    with ThreadPoolExecutor(max_workers=min(AT_ONCE_MAX, len(words))) as at_once:
        return list(at_once.map(_post, words))


def _post(word: Word) -> bool:
    connection = http.client.HTTPConnection(word.host, word.port, timeout=DEADLINE_S)
    try:
        connection.request("POST", "/policy", word.body)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
