"""`python -m fuzz.seeds`: writes the inputs that fuzzing starts from, made from real messages, into fuzz/corpus.

To be run again when a message, a setting or a format was added; what fuzzers found later lies beside them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
from kvpeer.agent.certificates import Authority
from kvpeer.agent.config.keys import ENV_PREFIX, config_keys
from kvpeer.agent.discovery import AddressFile
from kvpeer.agent.security import agent_uri
from kvpeer.agent.told_policy import signature
from kvpeer.model import AgentId
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, pack_frame
from kvpeer.wire.messages import ClientWelcome, Commit, Fetch, Locate, Release, Reserve, Reset
from wire.message_samples import CLIENT_SAMPLES, KEY, PEER_SAMPLES

from fuzz import disk, files, sockets, wire

CORPUS = Path(__file__).parent / "corpus"

Seeds = Iterator[tuple[str, bytes]]


def main() -> None:
    for target in ("wire", "files", "sockets", "server", "connection", "slots"):
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in globals()[f"{target}_seeds"]():
            (folder / f"seed-{name}").write_bytes(content)


def wire_seeds() -> Seeds:
    for name, (message, _) in PEER_SAMPLES.items():
        yield f"peer-{name}", bytes([wire.BODY_OF_PEER]) + encode(message)
    for name, (message, _) in CLIENT_SAMPLES.items():
        yield f"client-{name}", bytes([wire.BODY_OF_CLIENT]) + encode(message)
    frames = [pack_frame(FrameKind.REQUEST, 1, encode(PEER_SAMPLES["Lookup"][0]), 1000)]
    frames += [pack_frame(FrameKind.NOTICE, 0, encode(PEER_SAMPLES["Touch"][0])), pack_frame(FrameKind.REPLY, 1, b"")]
    yield "frames", bytes([17]) + b"".join(frames)


def files_seeds() -> Seeds:
    groups: dict[str, list[str]] = {}
    for key in config_keys():
        value = {"size": "64Mi", "duration": "2s"}.get(key.unit, "1")
        groups.setdefault(key.group, []).append(f"  {key.name}: {value}")
        yield f"env-{key.path}", bytes([files.ENVIRONMENT]) + f"{key.variable.removeprefix('KVPEER_')}={value}".encode()
    assert ENV_PREFIX == "KVPEER_"
    for group, lines in groups.items():
        yield f"settings-{group}", bytes([files.SETTINGS]) + "\n".join([f"{group}:", *lines]).encode()
    address = msgspec.json.encode(AddressFile("ab" * 16, "n1", "10.0.0.1", 7401, 7402, 1111, 5555))
    yield "address", bytes([files.ADDRESS]) + address.replace(b"1111", b"PID").replace(b"5555", b"TICKS")
    yield "secret", bytes([files.SECRET]) + b"00ff" * 8 + b"\n"
    authority = Authority(b"s" * 16, "c")
    yield "pem", bytes([files.PEM]) + authority.certificate_pem
    uri = agent_uri("c", AgentId(bytes(16)))
    yield (
        "pem-leaf",
        bytes([files.PEM]) + b"-----BEGIN CERT" + authority.leaf_pem(uri, "10.0.0.1").partition(b"BEGIN CERT")[2],
    )

    for name, content in disk.record_seeds():
        yield name, bytes([files.RECORD]) + content
    for name, content in disk.index_seeds():
        yield name, bytes([files.INDEX]) + content


def sockets_seeds() -> Seeds:
    requests = [Reserve(0, KEY, KEY), Locate("r", 0, KEY, KEY), Fetch("r", 0, KEY, KEY), Reset("test")]
    requests += [Commit(struct.pack("<I", 0), struct.pack("<I", 1), bytes(8))]
    for idx, request in enumerate(requests):
        frame = pack_frame(FrameKind.REQUEST, idx, encode(request), 1000)
        yield f"client-{type(request).__name__}", bytes([sockets.GREETED_CLIENT]) + frame
    notice = pack_frame(FrameKind.NOTICE, 0, encode(Release(1, struct.pack("<I", 0), b"\3")))
    yield "client-Release", bytes([sockets.GREETED_CLIENT]) + notice
    hello = pack_frame(FrameKind.REQUEST, 0, encode(CLIENT_SAMPLES["ClientHello"][0]), 1000)
    yield "client-hello", bytes([sockets.CLIENT]) + hello
    extent_bytes = sockets.EXTENT_BYTES
    welcome = ClientWelcome(sockets.AGENT_ID, extent_bytes, extent_bytes, 4096, 2, 64)
    frame = pack_frame(FrameKind.REPLY, 0, encode(welcome))
    for choice in range(6):
        yield f"agent-welcome-{choice}", bytes([sockets.AGENT, choice]) + frame
    late = pack_frame(FrameKind.REPLY, 7, encode(CLIENT_SAMPLES["Located"][0]))
    yield "agent-late", bytes([sockets.AGENT, 0]) + frame + late
    refusal = pack_frame(FrameKind.ERROR, 0, encode(PEER_SAMPLES["Refusal"][0]))
    yield "agent-refusal", bytes([sockets.AGENT, 1]) + refusal
    for path in ("/metrics", "/healthz?x=1", "/"):
        request = f"GET {path} HTTP/1.1\r\nHost: h\r\nAccept: text/plain;version=0.0.4\r\n\r\n"
        yield f"http-{path.strip('/').partition('?')[0] or 'root'}", bytes([sockets.HTTP]) + request.encode()
    variables = {"KVPEER_CONNECTOR_MODE": "shadow"}
    told = {"cluster": sockets.POLICY_CLUSTER, "agent": sockets.POLICY_AGENT, "revision": 7, "policy": "p"}
    document = json.dumps({**told, "variables": variables})
    body = json.dumps({"document": document, "signature": signature(sockets.POLICY_KEY, document)})
    request = f"POST /policy HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    yield "http-policy", bytes([sockets.HTTP]) + request.encode()


def server_seeds() -> Seeds:
    """Of the native data server; the ids are those of server_fuzz.cpp."""
    hello = struct.pack("<IHH32s16s16s", 0x4850564B, 1, 0, b"\3", b"\2", b"\1")
    pages = [struct.pack("<II16sII", slot, 1, bytes([slot + 1]), 64 + 100 * slot, 0) for slot in range(5)]
    request = struct.pack("<IIII", 0x5250564B, 1, len(pages), 0) + b"".join(pages)
    yield "hello", b"\0" + hello + request
    yield "request", b"\1" + request
    yield "two-requests", b"\1" + request + struct.pack("<IIII", 0x5250564B, 2, 1, 0) + pages[2]


def connection_seeds() -> Seeds:
    """Of the native reader; the ids are those of connection_fuzz.cpp."""
    answer = struct.pack("<IHH16sII", 0x4150564B, 1, 0, b"\1", 3, 0)
    stale = b"".join(struct.pack("<IHHII", 0x5050564B, 1, 0, 1, idx) for idx in range(3))
    yield "hello", b"\0" + answer + stale
    yield "refused", b"\0" + struct.pack("<IHH16sII", 0x4150564B, 1, 1, b"", 0, 0)
    yield "stale", b"\1" + stale
    for mode in (4, 6):
        yield f"pages-{mode}", bytes([mode]) + bytes([0, 1, 7]) * 3
        yield f"parts-{mode}", bytes([mode]) + bytes([0, 2, 7, 7]) * 3
        yield f"lies-{mode}", bytes([mode]) + bytes([15, 2, 7, 7]) * 3 + bytes(40)


def slots_seeds() -> Seeds:
    """Of slot headers in shared memory; the ids are those of slots_fuzz.cpp."""
    header = struct.pack("<IBBHII16s16sB7sII", 0x5350564B, 1, 2, 2, 3, 128, b"\2", b"\1", 1, b"", 0, 0)
    parts = struct.pack("<IIQ", 0, 64, 0) + struct.pack("<IIQ", 64, 64, 0)
    for mode in (1, 3, 5, 7, 0xA1):
        yield f"page-{mode}", bytes([mode]) + header + parts


if __name__ == "__main__":
    main()
