from __future__ import annotations

import pytest
from kvpeer.model import Verify

from transport.page_pool import TRANSPORTS, PagePool


@pytest.fixture
def pages():
    pool = PagePool()
    yield pool
    pool.close()


@pytest.fixture(params=list(Verify), ids=[mode.name.lower() for mode in Verify])
def verify(request):
    return request.param


@pytest.fixture(params=list(TRANSPORTS))
def transport(request, pages, verify):
    with TRANSPORTS[request.param](pages, verify) as opened:
        yield opened
