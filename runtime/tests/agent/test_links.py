"""The control channel between honest agents: requests, notices, and how links come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from kvpeer.agent.links import LinkEnd, LinkSettings, PeerRefusedError
from kvpeer.agent.links import link as link_module
from kvpeer.model import CapacityError, ConfigError, PeerUnavailableError, RemoteProtocolError
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, pack_frame
from kvpeer.wire.messages import (
    AgentInfo,
    Lookup,
    Ok,
    OpenData,
    PeerHello,
    PeerMessage,
    PeerWelcome,
    Ping,
    PingAck,
    Refusal,
    Touch,
)
from link_nodes import HOST, LOOPS, Node, RawPeer, id_of, raw_server, run, security_of, until

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=LOOPS)
def run_on(request: pytest.FixtureRequest) -> Run:
    return lambda main: run(LOOPS[request.param], main)


async def echo_ping(peer: AgentInfo, ping: Ping) -> PingAck:
    return PingAck(ping.sequence, peer.agent_id, [])


def test_one_link_carries_requests_in_both_directions(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start({Ping: echo_ping}) as a, Node(2).start({Ping: echo_ping}) as b:
            a.links.know([b.info])
            assert await a.links.request(b.agent_id, Ping(7, []), 5) == PingAck(7, a.agent_id, [])
            assert await b.links.request(a.agent_id, Ping(8, []), 5) == PingAck(8, b.agent_id, [])
            assert (a.ups, b.ups) == ([b.info], [a.info])
            assert a.count("kvpeer_links_up", direction="out") == 1
            assert b.count("kvpeer_links_up", direction="in") == 1
            assert b.count("kvpeer_links_up", direction="out") == 0
            assert a.count("kvpeer_links_requests_total", message="Ping", outcome="answered") == 1
            assert a.count("kvpeer_links_served_requests_total", message="Ping", outcome="answered") == 1

    run_on(main())


def test_requests_in_flight_are_answered_in_any_order(run_on: Run) -> None:
    async def main() -> None:
        gates = [asyncio.Event() for _ in range(50)]

        async def wait_turn(_: AgentInfo, ping: Ping) -> PingAck:
            await gates[ping.sequence].wait()
            if ping.sequence:
                gates[ping.sequence - 1].set()
            return PingAck(ping.sequence, bytes(16), [])

        async with Node(1).start() as a, Node(2).start({Ping: wait_turn}) as b:
            a.links.know([b.info])
            asked = [asyncio.ensure_future(a.links.request(b.agent_id, Ping(n, []), 10)) for n in range(50)]
            gates[49].set()
            answers = await asyncio.gather(*asked)
            assert [answer.sequence for answer in answers] == list(range(50))

    run_on(main())


def test_a_large_message_survives(run_on: Run) -> None:
    async def main() -> None:
        async def mirror(_: AgentInfo, lookup: Lookup) -> Touch:
            return Touch(lookup.keys, lookup.partitions)

        async with Node(1).start() as a, Node(2).start({Lookup: mirror}) as b:
            a.links.know([b.info])
            body = bytes(range(256)) * 8000
            answers = await asyncio.gather(*(a.links.request(b.agent_id, Lookup(body, b""), 20) for _ in range(4)))
            assert answers == [Touch(body, b"")] * 4

    run_on(main())


def test_a_silent_agent_costs_the_deadline_and_no_more(run_on: Run) -> None:
    async def main() -> None:
        async def never(_: AgentInfo, ping: Ping) -> PingAck:
            await asyncio.Event().wait()
            raise AssertionError

        async with Node(1).start() as a, Node(2).start({Ping: never, OpenData: ok}) as b:
            a.links.know([b.info])
            await a.links.request(b.agent_id, OpenData(1), 5)
            started_at = asyncio.get_running_loop().time()
            with pytest.raises(PeerUnavailableError, match="within"):
                await a.links.request(b.agent_id, Ping(1, []), 0.2)
            assert asyncio.get_running_loop().time() - started_at < 2
            await a.links.request(b.agent_id, OpenData(1), 5)  # the link is as good as before
            await until(
                lambda: b.count("kvpeer_links_served_requests_total", message="OpenData", outcome="answered") == 2
            )

    run_on(main())


async def ok(_: AgentInfo, __: object) -> PeerMessage | None:
    return None


def test_a_late_reply_is_dropped_and_counted(run_on: Run) -> None:
    async def main() -> None:
        own = security_of(id_of(2))
        info = AgentInfo(id_of(2), "raw", HOST, 1, 2)

        async def serve(peer: RawPeer) -> None:
            hello, _ = await peer.receive()
            peer.send(FrameKind.REPLY, hello.id, PeerWelcome("c", info, []))
            first, _ = await peer.receive()
            second, _ = await peer.receive()  # is sent after the first one's deadline
            peer.send(FrameKind.REPLY, first.id, PingAck(1, info.agent_id, []))
            peer.send(FrameKind.REPLY, second.id, PingAck(2, info.agent_id, []))
            await peer.ended()

        server, port = await raw_server(own, serve)
        async with server, Node(1).start() as a:
            a.links.know([AgentInfo(id_of(2), "raw", HOST, port, 2)])
            with pytest.raises(PeerUnavailableError, match=r"no answer to Ping within 0\.\d+ s"):
                await a.links.request(id_of(2), Ping(1, []), 0.1)
            answer = await a.links.request(id_of(2), Ping(2, []), 5)
            assert answer.sequence == 2
            assert a.count("kvpeer_links_late_replies_total") == 1

    run_on(main())


def test_notices_arrive_in_order_and_open_the_link(run_on: Run) -> None:
    async def main() -> None:
        got: list[int] = []

        async def keep(_: AgentInfo, ping: Ping) -> None:
            got.append(ping.sequence)

        async with Node(1).start() as a, Node(2).start({Ping: keep}) as b:
            a.links.know([b.info])
            for n in range(100):
                a.links.notify(b.agent_id, Ping(n, []))
            await until(lambda: len(got) == 100)
            assert got == list(range(100))

    run_on(main())


def test_notices_beyond_the_queue_or_for_nobody_are_dropped_and_counted(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1, LinkSettings(notices_max=3)).start() as a:
            gone = Node(2)
            await gone.links.close(1)
            a.links.know([gone.info])
            for n in range(5):
                a.links.notify(gone.agent_id, Ping(n, []))
            a.links.notify(id_of(9), Ping(0, []))
            await until(lambda: a.unreachables == [gone.agent_id])
            dropped = "kvpeer_links_dropped_notices_total"
            assert a.count(dropped, reason="queue_full") == 2
            assert a.count(dropped, reason="unreachable") == 4

    run_on(main())


def test_errors_of_a_handler_become_refusals(run_on: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def full(_: AgentInfo, __: Ping) -> None:
            raise CapacityError("the shard is full")

        async def broken(_: AgentInfo, __: Lookup) -> None:
            raise ZeroDivisionError("secret detail")

        async def refuses(_: AgentInfo, __: OpenData) -> Refusal:
            return Refusal("not_ready", "still starting")

        handlers = {Ping: full, Lookup: broken, OpenData: refuses}
        async with Node(1).start() as a, Node(2).start(handlers) as b:
            a.links.know([b.info])
            expected = [
                (Ping(1, []), "busy", "the shard is full"),
                (Lookup(b"", b""), "internal", "Lookup failed; see the log of the agent"),
                (OpenData(1), "not_ready", "still starting"),
                (Touch(b"", b""), "unsupported", "Touch is not served here"),
            ]
            for message, code, text in expected:
                with pytest.raises(PeerRefusedError, match=text) as caught:
                    await a.links.request(b.agent_id, message, 5)
                assert caught.value.code == code
            assert b.count("kvpeer_agent_task_failures_total", task="serve Lookup") == 1
            assert len(a.ups) == 1  # all on one link

    run_on(main())
    assert "secret detail" in caplog.text


def test_requests_beyond_the_limit_are_refused_at_once_on_both_sides(run_on: Run) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        served: list[Ping] = []

        async def wait(_: AgentInfo, ping: Ping) -> None:
            served.append(ping)
            await gate.wait()

        async with Node(1).start() as a, Node(2, LinkSettings(requests_max=2)).start({Ping: wait, OpenData: ok}) as b:
            a.links.know([b.info])
            held = [asyncio.ensure_future(a.links.request(b.agent_id, Ping(n, []), 10)) for n in range(2)]
            await until(lambda: len(served) == 2)
            with pytest.raises(PeerRefusedError, match="2 requests of this link are being served") as caught:
                await a.links.request(b.agent_id, OpenData(1), 5)
            assert caught.value.code == "busy"
            gate.set()
            assert await asyncio.gather(*held) == [Ok(), Ok()]
            await a.links.request(b.agent_id, OpenData(1), 5)

    run_on(main())


def test_agents_that_dial_each_other_at_once_both_succeed(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start({Ping: echo_ping}) as a, Node(2).start({Ping: echo_ping}) as b:
            a.links.know([b.info])
            b.links.know([a.info])
            for n in range(20):
                answers = await asyncio.gather(
                    a.links.request(b.agent_id, Ping(n, []), 5), b.links.request(a.agent_id, Ping(n, []), 5)
                )
                assert [answer.sequence for answer in answers] == [n, n]
            assert a.downs == b.downs == []

    run_on(main())


def test_an_orderly_end_and_a_death_are_told_apart(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start() as a:
            orderly = Node(2).start({Ping: echo_ping})
            a.links.know([orderly.info])
            await a.links.request(orderly.agent_id, Ping(1, []), 5)
            await orderly.links.close(2)
            await until(lambda: a.downs == [(orderly.agent_id, LinkEnd.CLOSED)])

            raw = await RawPeer.dial(a.links.control_port, security_of(id_of(3)))
            await raw.hello(AgentInfo(id_of(3), "raw", HOST, 1, 2))
            raw.close()
            await until(lambda: a.downs[1:] == [(id_of(3), LinkEnd.RESET)])
            assert a.count("kvpeer_links_up", direction="in") == 0

    run_on(main())


def test_a_request_that_comes_with_the_welcome_is_served(run_on: Run) -> None:
    async def main() -> None:
        info = AgentInfo(id_of(2), "raw", HOST, 1, 2)
        answers: list[PeerMessage] = []

        async def serve(peer: RawPeer) -> None:
            hello, _ = await peer.receive()
            peer.writer.writelines(
                [
                    pack_frame(FrameKind.REPLY, hello.id, encode(PeerWelcome("c", info, []))),
                    pack_frame(FrameKind.REQUEST, 1, encode(Ping(1, [])), 5000),
                    pack_frame(FrameKind.REQUEST, 2, encode(Ping(2, [])), 5000),
                ]
            )
            answers.extend([(await peer.receive())[1] for _ in range(2)])
            await peer.ended()

        server, port = await raw_server(security_of(id_of(2)), serve)
        async with server, Node(1).start({Ping: echo_ping}) as a:
            await a.links.join(HOST, port, 5)
            await until(lambda: answers == [PingAck(1, id_of(2), []), PingAck(2, id_of(2), [])])

    run_on(main())


def test_requests_under_way_fail_when_the_link_ends(run_on: Run) -> None:
    async def main() -> None:
        async def serve(peer: RawPeer) -> None:
            hello, _ = await peer.receive()
            peer.send(FrameKind.REPLY, hello.id, PeerWelcome("c", AgentInfo(id_of(2), "raw", HOST, 1, 2), []))
            await peer.receive()

        server, port = await raw_server(security_of(id_of(2)), serve)
        async with server, Node(1).start() as a:
            a.links.know([AgentInfo(id_of(2), "raw", HOST, port, 2)])
            with pytest.raises(PeerUnavailableError, match="the link is gone"):
                await a.links.request(id_of(2), Ping(1, []), 10)
            assert a.downs == [(id_of(2), LinkEnd.RESET)]

    run_on(main())


def test_an_idle_link_closes_and_the_next_request_opens_another(run_on: Run) -> None:
    async def main() -> None:
        settings = LinkSettings(idle_s=0.2)
        async with Node(1, settings).start() as a, Node(2).start({Ping: echo_ping}) as b:
            a.links.know([b.info])
            await a.links.request(b.agent_id, Ping(1, []), 5)
            await until(lambda: a.downs == [(b.agent_id, LinkEnd.IDLE)] and b.downs == [(a.agent_id, LinkEnd.CLOSED)])
            await a.links.request(b.agent_id, Ping(2, []), 5)
            assert len(a.ups) == 2

    run_on(main())


def test_a_request_that_meets_an_orderly_close_is_asked_again(run_on: Run) -> None:
    async def main() -> None:
        info = AgentInfo(id_of(2), "raw", HOST, 1, 2)
        connections: list[RawPeer] = []

        async def serve(peer: RawPeer) -> None:
            connections.append(peer)
            hello, _ = await peer.receive()
            peer.send(FrameKind.REPLY, hello.id, PeerWelcome("c", msgspec.structs.replace(info, control_port=port), []))
            request, ping = await peer.receive()
            if len(connections) == 1:
                peer.send(FrameKind.ERROR, 0, Refusal("closing", "idle"))
            else:
                peer.send(FrameKind.REPLY, request.id, PingAck(ping.sequence, info.agent_id, []))
            await peer.ended()

        server, port = await raw_server(security_of(id_of(2)), serve)
        async with server, Node(1).start() as a:
            a.links.know([AgentInfo(id_of(2), "raw", HOST, port, 2)])
            assert (await a.links.request(id_of(2), Ping(5, []), 5)).sequence == 5
            assert len(connections) == 2

    run_on(main())


def test_a_failed_dial_is_not_repeated_before_its_backoff(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1, LinkSettings(backoff_min_s=5, backoff_max_s=5)).start() as a:
            gone = Node(2)
            await gone.links.close(1)
            a.links.know([gone.info])
            with pytest.raises(PeerUnavailableError, match=r"Connect call failed|Connection refused"):
                await a.links.request(gone.agent_id, Ping(1, []), 5)
            with pytest.raises(PeerUnavailableError, match="node-2 is dialled again in"):
                await a.links.request(gone.agent_id, Ping(1, []), 5)
            assert a.count("kvpeer_links_dial_failures_total") == 1
            back = Node(2, port=gone.info.control_port).start({Ping: echo_ping})
            async with back:
                back.links.know([a.info])
                back.links.notify(a.agent_id, Ping(0, []))
                await until(lambda: len(a.ups) == 1)
                await a.links.request(gone.agent_id, Ping(1, []), 5)  # its own dial ended the backoff

    run_on(main())


def test_a_new_agent_at_a_known_address_ends_the_old_one(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start() as a, Node(3).start({Ping: echo_ping}) as new:
            old = AgentInfo(id_of(2), "node-2", HOST, new.info.control_port, 9)
            a.links.know([old])
            with pytest.raises(PeerUnavailableError, match=f"node-2 is gone: agent {new.agent_id.hex()}"):
                await a.links.request(id_of(2), Ping(1, []), 5)
            assert a.ups == [new.info]
            assert a.unreachables == [id_of(2)]
            await a.links.request(new.agent_id, Ping(1, []), 5)

    run_on(main())


def test_forgetting_an_agent_closes_its_link_and_fails_its_requests(run_on: Run) -> None:
    async def main() -> None:
        async def never(_: AgentInfo, __: Ping) -> None:
            await asyncio.Event().wait()

        async with Node(1).start() as a, Node(2).start({Ping: never, OpenData: ok}) as b:
            a.links.know([b.info])
            await a.links.request(b.agent_id, OpenData(1), 5)
            asked = asyncio.ensure_future(a.links.request(b.agent_id, Ping(1, []), 10))
            await asyncio.sleep(0)
            a.links.forget(b.agent_id)
            with pytest.raises(PeerUnavailableError, match="forgotten"):
                await asked
            with pytest.raises(PeerUnavailableError, match="is not a member"):
                await a.links.request(b.agent_id, OpenData(1), 5)
            await until(lambda: b.downs == [(a.agent_id, LinkEnd.CLOSED)])

    run_on(main())


def test_joining_by_name_gives_the_members_and_passes_over_the_own_address(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start() as a, Node(2).start({Ping: echo_ping}) as b:
            b.known.append(AgentInfo(id_of(5), "other", HOST, 5, 5))
            welcome = await a.links.join("localhost", b.info.control_port, 5)
            assert welcome == PeerWelcome("c", b.info, [b.info, b.known[0]])
            await a.links.request(b.agent_id, Ping(1, []), 5)
            for host in (HOST, "localhost"):
                with pytest.raises(PeerUnavailableError, match="no agent to join at"):
                    await a.links.join(host, a.info.control_port, 5)
            assert a.refused("self") == 0

    run_on(main())


def test_an_agent_behind_another_address_passes_over_both_and_tells_that_one(run_on: Run) -> None:
    """Its name as a seed (a headless service) leads to where it listens, and may lead to where others reach it."""

    async def main() -> None:
        async with Node(1) as a, Node(2).start() as b:
            a.info = AgentInfo(a.agent_id, "behind", "127.0.0.9", 9, 9)
            a.start()
            for host, port in ((HOST, a.links.control_port), ("127.0.0.9", 9)):
                with pytest.raises(PeerUnavailableError, match="only this agent"):
                    await a.links.join(host, port, 5)
            assert a.refused("self") == 0
            welcome = await b.links.join(HOST, a.links.control_port, 5)
            assert welcome.info == a.info

    run_on(main())


def test_an_unreachable_or_silent_seed_costs_the_dial_timeout_and_no_more(run_on: Run) -> None:
    async def main() -> None:
        async def silent(peer: RawPeer) -> None:
            await peer.ended()

        server, port = await raw_server(None, silent)  # accepts TCP and never answers, as a frozen agent does
        async with server, Node(1, LinkSettings(dial_timeout_s=0.3)).start() as a:
            started_at = asyncio.get_running_loop().time()
            with pytest.raises(PeerUnavailableError, match=r"did not answer within 0\.3 s"):
                await a.links.join(HOST, port, 5)
            with pytest.raises(PeerUnavailableError, match="cannot be resolved"):
                await a.links.join("no-such-name.invalid", 1, 5)
            assert asyncio.get_running_loop().time() - started_at < 4

    run_on(main())


@pytest.mark.parametrize("host", ["a" * 64, "..", "\0", "é" * 80], ids=["long label", "no label", "nul", "idna"])
def test_an_agent_at_what_is_no_address_is_unavailable_like_any_other(run_on: Run, host: str) -> None:
    """Its own word, by way of a rumour: whoever asks it must get the error that it waits for."""

    async def main() -> None:
        async with Node(1).start() as a:
            a.links.know([AgentInfo(id_of(2), "odd", host, 1, 2)])
            with pytest.raises(PeerUnavailableError):
                await a.links.request(id_of(2), Ping(1, []), 5)
            assert a.unreachables == [id_of(2)]
            with pytest.raises(PeerUnavailableError):
                await a.links.join(host, 1, 5)

    run_on(main())


def test_closing_says_goodbye_within_its_deadline_even_to_a_frozen_peer(run_on: Run) -> None:
    async def main() -> None:
        a = Node(1).start()
        frozen = await RawPeer.dial(a.links.control_port, security_of(id_of(2)))
        await frozen.hello(AgentInfo(id_of(2), "raw", HOST, 1, 2))
        await until(lambda: len(a.ups) == 1)
        frozen.reader._transport.pause_reading()  # type: ignore[attr-defined]
        started_at = asyncio.get_running_loop().time()
        await a.links.close(3)
        assert asyncio.get_running_loop().time() - started_at < 3
        assert a.downs == [(id_of(2), LinkEnd.SHUTDOWN)]
        frozen.close()

    run_on(main())


def test_a_peer_that_takes_no_replies_is_dropped(run_on: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "REPLY_SEND_S", 0.3)

    async def main() -> None:
        async def large(_: AgentInfo, __: Ping) -> Touch:
            return Touch(b"", bytes(3 << 20))

        async with Node(1).start({Ping: large}) as a:
            deaf = await RawPeer.dial(a.links.control_port, security_of(id_of(2)))
            await deaf.hello(AgentInfo(id_of(2), "raw", HOST, 1, 2))
            deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
            for n in range(20):
                deaf.send(FrameKind.REQUEST, n + 2, Ping(n, []), 60_000)
            await until(lambda: a.downs == [(id_of(2), LinkEnd.SLOW)])
            deaf.close()

    run_on(main())


def test_a_taken_port_is_a_configuration_error() -> None:
    first = Node(1)
    with pytest.raises(ConfigError, match=r"the control channel cannot listen on .*: Address already in use"):
        Node(2, port=first.info.control_port)
    first.links._listener.close()


def test_a_handler_that_finds_a_broken_message_ends_the_link(run_on: Run) -> None:
    async def main() -> None:
        async def check(_: AgentInfo, __: Lookup) -> None:
            raise RemoteProtocolError("keys: 5 bytes are not a whole number of 16-byte items")

        async with Node(1).start() as a, Node(2).start({Lookup: check}) as b:
            a.links.know([b.info])
            with pytest.raises(PeerUnavailableError, match="Lookup: keys: 5 bytes"):
                await a.links.request(b.agent_id, Lookup(b"12345", b""), 5)
            await until(lambda: b.downs == [(a.agent_id, LinkEnd.PROTOCOL)])
            assert b.refused("protocol") == 1

    run_on(main())


def test_hello_is_served_once_only(run_on: Run) -> None:
    async def main() -> None:
        async with Node(1).start() as a:
            raw = await RawPeer.dial(a.links.control_port, security_of(id_of(2)))
            info = AgentInfo(id_of(2), "raw", HOST, 1, 2)
            await raw.hello(info)
            raw.send(FrameKind.REQUEST, 2, PeerHello("c", info), 1000)
            frame, refusal = await raw.receive()
            assert frame.kind is FrameKind.ERROR
            assert refusal == Refusal("unsupported", "PeerHello is not served here")
            raw.close()

    run_on(main())
