"""The control channel against strangers: each is refused, counted by reason, and logged once per peer."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from kvpeer.agent.certificates import Authority
from kvpeer.agent.links import LinkSettings
from kvpeer.agent.security import Security
from kvpeer.model import PeerUnavailableError
from kvpeer.wire.framing import FrameKind
from kvpeer.wire.messages import AgentInfo, Ok, PeerHello, PeerWelcome, Ping, PingAck, Refusal, Touch
from link_nodes import HOST, LOOPS, Node, RawPeer, id_of, run, security_of, until

Run = Callable[[Coroutine[Any, Any, None]], None]

RAW_ID = id_of(7)
RAW_INFO = AgentInfo(RAW_ID, "raw", HOST, 1, 2)


@pytest.fixture(params=LOOPS)
def run_on(request: pytest.FixtureRequest) -> Run:
    return lambda main: run(LOOPS[request.param], main)


async def echo_ping(peer: AgentInfo, ping: Ping) -> PingAck:
    return PingAck(ping.sequence, peer.agent_id, [])


async def still_serves(node: Node) -> None:
    """An honest agent is not bothered by what happened before."""
    async with Node(99).start() as honest:
        honest.links.know([node.info])
        assert (await honest.links.request(node.agent_id, Ping(1, []), 5)).sequence == 1


@pytest.mark.parametrize("foreign", [{"secret": "cd" * 32}, {"cluster": "d"}], ids=["other secret", "other cluster"])
def test_an_agent_of_another_secret_or_cluster_gets_no_link(run_on: Run, foreign: dict[str, str]) -> None:
    async def main() -> None:
        async with (
            Node(1).start({Ping: echo_ping}) as a,
            Node(2, security=security_of(id_of(2), **foreign)).start({Ping: echo_ping}) as stranger,
        ):
            for one, other in ((a, stranger), (stranger, a)):
                one.links.know([other.info])
                with pytest.raises(PeerUnavailableError, match="TLS"):
                    await one.links.request(other.agent_id, Ping(1, []), 5)
            await until(lambda: a.refused("tls") == stranger.refused("tls") == 2)
            assert a.ups == stranger.ups == []
            await still_serves(a)

    run_on(main())


def test_a_dialler_without_a_certificate_learns_of_its_refusal(run_on: Run) -> None:
    """In TLS 1.3 its own handshake succeeds: only the missing welcome shows it."""

    async def main() -> None:
        full = security_of(id_of(2))
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.load_verify_locations(cadata=Authority(bytes.fromhex("ab" * 32), "c").certificate_pem.decode())
        security = Security("c", full.server_context, bare)
        async with Node(1).start({Ping: echo_ping}) as a, Node(2, security=security).start() as uncertified:
            uncertified.links.know([a.info])
            with pytest.raises(PeerUnavailableError, match="did not welcome us"):
                await uncertified.links.request(a.agent_id, Ping(1, []), 5)
            await until(lambda: a.refused("tls") == 1)
            assert uncertified.refused("tls") == 1
            assert a.ups == []
            await still_serves(a)

    run_on(main())


def test_plain_text_is_refused_by_tls(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start({Ping: echo_ping}) as a:
            raw = await RawPeer.dial(a.links.control_port, None)
            raw.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
            await raw.ended()
            await until(lambda: a.refused("tls") == 1)
            raw.close()
            await still_serves(a)

    run_on(main())


def header(body_bytes: int, version: int = 1, kind: int = 1) -> bytes:
    return struct.pack("<I2sBBQI", body_bytes, b"KV", version, kind, 1, 1000)


@pytest.mark.parametrize(
    ("said", "reason", "answer"),
    [
        (header(0xFFFF_FFFF), "protocol", "4294967295 bytes, beyond the limit of 4096"),
        (header(5000), "protocol", "5000 bytes, beyond the limit of 4096"),
        (header(0, version=2), "version", "the other side speaks wire version 2, this side 1"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "protocol", "not a kvpeer frame"),
        (header(1) + b"\xc1", "protocol", "malformed"),
        (header(2) + b"\x91\x3c", "protocol", "the first message is Ok instead of PeerHello"),
    ],
    ids=["4 GiB", "too large for a hello", "other version", "http", "garbage", "no hello"],
)
def test_a_certified_peer_that_breaks_the_protocol_is_told_and_dropped(
    run_on: Run, said: bytes, reason: str, answer: str
) -> None:
    async def main() -> None:
        async with Node(1).start({Ping: echo_ping}) as a:
            raw = await RawPeer.dial(a.links.control_port, security_of(RAW_ID))
            raw.writer.write(said)
            frame, refusal = await raw.receive()
            assert (frame.kind, frame.id) == (FrameKind.ERROR, 0)
            assert isinstance(refusal, Refusal)
            assert answer in refusal.message
            await raw.ended()
            raw.close()
            assert a.refused(reason) == 1
            assert a.ups == []
            await still_serves(a)

    run_on(main())


def test_who_never_says_hello_is_dropped_after_the_timeout(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1, LinkSettings(hello_timeout_s=0.3)).start({Ping: echo_ping}) as a:
            certified = await RawPeer.dial(a.links.control_port, security_of(RAW_ID))
            silent = await RawPeer.dial(a.links.control_port, None)
            await certified.ended()
            await silent.ended()
            await until(lambda: a.refused("hello_timeout") == 1 and a.refused("tls") == 1)
            certified.close()
            silent.close()
            await still_serves(a)

    run_on(main())


@pytest.mark.parametrize(
    ("cluster", "agent_id", "reason"),
    [("d", RAW_ID, "cluster"), ("c", id_of(8), "identity"), ("c", id_of(1), "self")],
    ids=["another cluster", "another agent", "our own id"],
)
def test_a_hello_that_the_certificate_does_not_support_is_refused(
    run_on: Run, cluster: str, agent_id: bytes, reason: str
) -> None:
    async def main() -> None:
        async with Node(1).start({Ping: echo_ping}) as a:
            raw = await RawPeer.dial(a.links.control_port, security_of(RAW_ID))
            frame, refusal = await raw.hello(AgentInfo(agent_id, "raw", HOST, 1, 2), cluster)
            assert frame.kind is FrameKind.ERROR
            assert isinstance(refusal, Refusal)
            assert refusal.code == "refused"
            await raw.ended()
            raw.close()
            assert a.refused(reason) == 1
            assert a.ups == []
            await still_serves(a)

    run_on(main())


def test_a_dialler_refuses_an_agent_that_is_not_who_it_says(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start() as a, Node(2, security=security_of(id_of(3))).start({Ping: echo_ping}) as liar:
            a.links.know([liar.info])
            with pytest.raises(PeerUnavailableError, match="is refused: it says it is agent"):
                await a.links.request(liar.agent_id, Ping(1, []), 5)
            assert a.refused("identity") == 1
            assert a.ups == []

    run_on(main())


def test_in_insecure_mode_the_cluster_still_counts(run_on: Run) -> None:
    async def main() -> None:
        def insecure(cluster: str) -> Security:
            return security_of(id_of(0), cluster=cluster, mode="insecure")

        async with (
            Node(1, security=insecure("c")).start({Ping: echo_ping}) as a,
            Node(2, security=insecure("c")).start() as b,
            Node(3, security=insecure("d")).start() as stranger,
        ):
            b.links.know([a.info])
            assert (await b.links.request(a.agent_id, Ping(4, []), 5)).sequence == 4
            stranger.links.know([a.info])
            with pytest.raises(PeerUnavailableError, match="it is of cluster 'd', not of 'c'"):
                await stranger.links.request(a.agent_id, Ping(1, []), 5)
            assert (a.refused("cluster"), stranger.refused("refused_us")) == (1, 1)

    run_on(main())


def test_a_stranger_is_logged_once_counted_each_time_and_holds_no_place(
    run_on: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Node(1, LinkSettings(inbound_max=2)).start({Ping: echo_ping}) as a:
            for n in range(1, 6):
                raw = await RawPeer.dial(a.links.control_port, None)
                raw.writer.write(b"x" * 100)
                await raw.ended()
                raw.close()
                await until(lambda n=n: a.refused("tls") == n)
            assert a.refused("limit") == 0
            await still_serves(a)

    run_on(main())
    assert sum("no link with 127.0.0.1 (tls" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("wait_s", [0.0, 5.0], ids=["leaves at once", "says nothing"])
def test_a_handshake_that_fails_without_a_word_is_logged_with_a_reason(
    run_on: Run, caplog: pytest.LogCaptureFixture, wait_s: float
) -> None:
    async def main() -> None:
        async with Node(1, LinkSettings(hello_timeout_s=0.3)).start() as a:
            silent = await RawPeer.dial(a.links.control_port, None)
            if not wait_s:
                silent.close()
            await until(lambda: a.refused("tls") == 1)
            silent.close()

    run_on(main())
    (logged,) = [record.getMessage() for record in caplog.records if "no link with" in record.getMessage()]
    assert logged.rpartition("counted): ")[2].strip(), logged


def test_links_beyond_the_inbound_limit_are_refused_and_a_free_place_is_used_again(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1, LinkSettings(inbound_max=2)).start() as a:
            held = []
            for n in (11, 12):
                raw = await RawPeer.dial(a.links.control_port, security_of(id_of(n)))
                assert isinstance((await raw.hello(AgentInfo(id_of(n), "raw", HOST, 1, 2)))[1], PeerWelcome)
                held.append(raw)
            with pytest.raises((OSError, EOFError)):
                await RawPeer.dial(a.links.control_port, security_of(id_of(13)))
            assert a.refused("limit") == 1
            held[0].close()
            await until(lambda: len(a.downs) == 1)
            raw = await RawPeer.dial(a.links.control_port, security_of(id_of(13)))
            assert isinstance((await raw.hello(AgentInfo(id_of(13), "raw", HOST, 1, 2)))[1], PeerWelcome)
            for peer in (raw, held[1]):
                peer.close()

    run_on(main())


def test_one_agent_cannot_hold_many_links(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start() as a:
            security = security_of(RAW_ID)
            peers = [await RawPeer.dial(a.links.control_port, security) for _ in range(5)]
            answers = [(await peer.hello(RAW_INFO))[1] for peer in peers]
            assert [type(answer) for answer in answers] == [PeerWelcome] * 4 + [Refusal]
            assert a.refused("limit") == 1
            for peer in peers:
                peer.close()

    run_on(main())


def test_who_asks_more_than_it_may_and_does_not_read_is_dropped_at_once(run_on: Run) -> None:
    async def main() -> None:
        async def large(_: AgentInfo, __: Ping) -> Touch:
            return Touch(b"", bytes(3 << 20))

        async with Node(1, LinkSettings(requests_max=4)).start({Ping: large}) as a:
            raw = await RawPeer.dial(a.links.control_port, security_of(RAW_ID))
            await raw.hello(RAW_INFO)
            raw.reader._transport.pause_reading()  # type: ignore[attr-defined]

            async def ask_on() -> None:
                for n in itertools.count(2):
                    raw.send(FrameKind.REQUEST, n, Ping(n, []), 60_000)
                    await asyncio.sleep(0.001)
                    if a.downs:
                        return

            await asyncio.wait_for(ask_on(), 5)  # far less than a reply that is not taken would cost
            assert [end.value for _, end in a.downs] == ["slow"]
            raw.close()

    run_on(main())


def test_a_frame_of_the_wrong_kind_after_the_hello_ends_the_link(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start() as a:
            raw = await RawPeer.dial(a.links.control_port, security_of(RAW_ID))
            await raw.hello(RAW_INFO)
            raw.send(FrameKind.ERROR, 5, Ok())
            frame, refusal = await raw.receive()
            assert (frame.kind, frame.id) == (FrameKind.ERROR, 0)
            assert refusal == Refusal("faulty", "an error frame holds Ok instead of Refusal")
            await raw.ended()
            raw.close()
            await until(lambda: a.refused("protocol") == 1)

    run_on(main())


def test_what_follows_the_hello_at_once_is_served_after_the_welcome(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start({Ping: echo_ping}) as a:
            raw = await RawPeer.dial(a.links.control_port, security_of(RAW_ID))
            raw.send(FrameKind.REQUEST, 1, PeerHello("c", RAW_INFO), 5000)
            for n in range(2, 10):
                raw.send(FrameKind.REQUEST, n, Ping(n, []), 5000)
            messages = [(await raw.receive())[1] for _ in range(9)]
            assert isinstance(messages[0], PeerWelcome)
            assert [message.sequence for message in messages[1:]] == list(range(2, 10))
            raw.close()

    run_on(main())
