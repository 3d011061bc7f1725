"""One sample of every message, and its bytes in wire version 1.

A change of any line here is a change of the protocol: only appended fields (with defaults) keep version 1.
"""

from __future__ import annotations

from kvpeer.wire.messages import (
    Abandon,
    AgentInfo,
    Applied,
    Apply,
    Canary,
    CanaryRead,
    ClientHello,
    ClientWelcome,
    Commit,
    Committed,
    CorruptReport,
    DataAdmission,
    Digests,
    DigestsChecked,
    Extents,
    Fetch,
    Fetched,
    Gossip,
    Holders,
    Inspect,
    Inspected,
    Locate,
    Located,
    Lookup,
    MemberUpdate,
    Message,
    Ok,
    OpenData,
    OpenQueuePair,
    PeerHello,
    PeerWelcome,
    Ping,
    PingAck,
    PingRequest,
    PolicyTold,
    Promote,
    Promoted,
    QueuePairOpened,
    ReadExtents,
    Refusal,
    RefusalCode,
    Release,
    Repair,
    RequestTrace,
    Reserve,
    Reserved,
    Reset,
    StaleReport,
    Synced,
    Touch,
    Traced,
)

ID = bytes(range(16))
KEY = b"k" * 16
INFO = AgentInfo(ID, "n1", "10.0.0.1", 7401, 7402)
UPDATE = MemberUpdate(INFO, 2, 3)

ID_HEX = "c410" + ID.hex()
KEY_HEX = "c410" + KEY.hex()
INFO_HEX = "9601" + ID_HEX + "a26e31" + "a8" + b"10.0.0.1".hex() + "cd1ce9" + "cd1cea"
UPDATE_HEX = "9404" + INFO_HEX + "0203"

TRACE = RequestTrace(
    "r", 512, 16, 65536, 0, 256, 496, ID, b"\xf0\1\0\0", 9, "miss", "pull", 496, 8, ID, 7, 6, 5, True, "loaded", 496,
    4, 3,
)  # fmt: skip

PEER_SAMPLES: dict[str, tuple[Message, str]] = {
    "PeerHello": (PeerHello("c", INFO), "9302" + "a163" + INFO_HEX),
    "PeerWelcome": (PeerWelcome("c", INFO, [INFO]), "9403" + "a163" + INFO_HEX + "91" + INFO_HEX),
    "Ping": (Ping(300, [UPDATE]), "9305" + "cd012c" + "91" + UPDATE_HEX),
    "PingAck": (PingAck(1, ID, []), "9406" + "01" + ID_HEX + "90"),
    "PingRequest": (PingRequest(1, ID, []), "9407" + "01" + ID_HEX + "90"),
    "Gossip": (Gossip([UPDATE]), "9208" + "91" + UPDATE_HEX),
    "Lookup": (Lookup(KEY, b"\x01\x00"), "9309" + KEY_HEX + "c4020100"),
    "Holders": (Holders(b"\0", b"\1", ID, b"h" * 20), "950a" + "c40100" + "c40101" + ID_HEX + "c414" + "68" * 20),
    "Apply": (
        Apply(0, b"\1", KEY, b"\1\0", b"\2\0\0\0", b"\3\0\0\0", b"\4\0\0\0", b"\2"),
        "990b" + "00" + "c40101" + KEY_HEX + "c4020100" + "c40402000000" + "c40403000000" + "c40404000000" + "c40102",
    ),
    "Applied": (Applied(1 << 40, b"\1\0"), "930c" + "cf0000010000000000" + "c4020100"),
    "Digests": (Digests(b"\1\0", b"d" * 8, b"\5\0\0\0"), "940d" + "c4020100" + "c408" + "64" * 8 + "c40405000000"),
    "DigestsChecked": (DigestsChecked(b""), "920e" + "c400"),
    "Repair": (
        Repair(7, 4095, KEY, b"\2\0\0\0", b"\3\0\0\0", b"\4\0\0\0", b"\2"),
        "980f" + "07" + "cd0fff" + KEY_HEX + "c40402000000" + "c40403000000" + "c40404000000" + "c40102",
    ),
    "Synced": (Synced(8, b"\1\0"), "9310" + "08" + "c4020100"),
    "StaleReport": (
        StaleReport(ID, KEY, b"\1\0", b"\2\0\0\0", b"\3\0\0\0"),
        "9611" + ID_HEX + KEY_HEX + "c4020100" + "c40402000000" + "c40403000000",
    ),
    "Touch": (Touch(b"\2\0\0\0", b"\3\0\0\0"), "9312" + "c40402000000" + "c40403000000"),
    "OpenData": (OpenData(2), "9213" + "02"),
    "DataAdmission": (DataAdmission(b"c" * 32, 5000), "9314" + "c420" + "63" * 32 + "cd1388"),
    "CorruptReport": (
        CorruptReport(KEY, b"\2\0\0\0", b"\3\0\0\0"),
        "9415" + KEY_HEX + "c40402000000" + "c40403000000",
    ),
    "Promote": (Promote(KEY, 250), "9316" + KEY_HEX + "ccfa"),
    "Promoted": (
        Promoted(b"\0", b"\2\0\0\0", b"\3\0\0\0"),
        "9417" + "c40100" + "c40402000000" + "c40403000000",
    ),
    "OpenQueuePair": (OpenQueuePair(b"e" * 32, 3), "9318" + "c420" + "65" * 32 + "03"),
    "QueuePairOpened": (QueuePairOpened(b"e" * 32, 8), "9319" + "c420" + "65" * 32 + "08"),
    "ReadExtents": (ReadExtents(4096, 3), "931a" + "cd1000" + "03"),
    "Extents": (Extents(b"x" * 32, 4097), "931b" + "c420" + "78" * 32 + "cd1001"),
    "Canary": (Canary(), "911e"),
    "CanaryRead": (CanaryRead("tcp", 90, 65536, ""), "951f" + "a3" + b"tcp".hex() + "5a" + "ce00010000" + "a0"),
    "Inspect": (Inspect("explain", "r", KEY), "943e" + "a7" + b"explain".hex() + "a172" + KEY_HEX),
    "Inspected": (Inspected(b"{}"), "923f" + "c4027b7d"),
    "Ok": (Ok(), "913c"),
    "Refusal": (Refusal(RefusalCode.BUSY, "no"), "933d" + "a4" + b"busy".hex() + "a26e6f"),
}

CLIENT_SAMPLES: dict[str, tuple[Message, str]] = {
    "ClientHello": (
        ClientHello("e", b"n" * 32, {"dtype": "bf16"}, 65536, 2, 1, 32768, 32768),
        "9928" + "a165" + "c420" + "6e" * 32 + "81a56474797065a462663136" + "ce00010000" + "02" + "01" + "cd8000" * 2,
    ),
    "ClientWelcome": (
        ClientWelcome(ID, 1 << 26, 1 << 30, 65536, 2, 1024),
        "9729" + ID_HEX + "ce04000000" + "ce40000000" + "ce00010000" + "02" + "cd0400",
    ),
    "Locate": (Locate("r", 0, KEY, KEY), "952a" + "a172" + "00" + KEY_HEX * 2),
    "Located": (
        Located(b"\2", "", ID, b"\1\0\0\0", b"\2\0\0\0"),
        "962b" + "c40102" + "a0" + ID_HEX + "c40401000000" + "c40402000000",
    ),
    "Fetch": (Fetch("r", 32, KEY, KEY, ID), "962c" + "a172" + "20" + KEY_HEX * 2 + ID_HEX),
    "Fetched": (
        Fetched(b"\0", b"\2\0\0\0", b"\3\0\0\0", b"o" * 8, 9, 1000),
        "972d" + "c40100" + "c40402000000" + "c40403000000" + "c408" + "6f" * 8 + "09" + "cd03e8",
    ),
    "Release": (Release(9, b"", b""), "942e" + "09" + "c400c400"),
    "Reserve": (Reserve(0, KEY, KEY), "942f" + "00" + KEY_HEX * 2),
    "Reserved": (
        Reserved(b"\0", b"\2\0\0\0", b"\3\0\0\0", b"o" * 8),
        "9530" + "c40100" + "c40402000000" + "c40403000000" + "c408" + "6f" * 8,
    ),
    "Commit": (
        Commit(b"\2\0\0\0", b"\3\0\0\0", b"s" * 8),
        "9431" + "c40402000000" + "c40403000000" + "c408" + "73" * 8,
    ),
    "Committed": (Committed(b"\0"), "9232" + "c40100"),
    "Abandon": (Abandon(b"\2\0\0\0", b"\3\0\0\0"), "9333" + "c40402000000" + "c40403000000"),
    "PolicyTold": (PolicyTold(7, "p", {"A": "on"}), "9435" + "07" + "a170" + "81" + "a141" + "a26f6e"),
    "Reset": (Reset("cache reset"), "9234" + "ab" + b"cache reset".hex()),
    "Traced": (
        Traced([TRACE], 2),
        "9337"
        + "91"
        + "dc0018"
        + "36"
        + "a172"
        + "cd0200"
        + "10"
        + "ce00010000"
        + "00"
        + "cd0100"
        + "cd01f0"
        + ID_HEX
        + "c404f0010000"
        + "09"
        + "a4"
        + b"miss".hex()
        + "a4"
        + b"pull".hex()
        + "cd01f0"
        + "08"
        + ID_HEX
        + "070605c3"
        + "a6"
        + b"loaded".hex()
        + "cd01f0"
        + "0403"
        + "02",
    ),
    "Inspect": PEER_SAMPLES["Inspect"],
    "Inspected": PEER_SAMPLES["Inspected"],
    "Ok": PEER_SAMPLES["Ok"],
    "Refusal": PEER_SAMPLES["Refusal"],
}

NESTED = {"AgentInfo", "MemberUpdate", "RequestTrace"}
"""Never a body of their own; covered inside the samples above."""
