"""Messages of the control channel (agent to agent, TLS) and of the client socket (engine to agent, Unix socket).

One file, so that the whole protocol can be read in one sitting. Every message is an array-like msgspec struct with an
integer tag; fields may only be appended, with defaults. Bulk values are packed little-endian arrays in one `bytes`
field (keys: n * 16, partitions: u16, slots and generations: u32, checksums: u64), so that no Python object is made per
page. docs/wire.md has the byte tables. Lengths that come from outside are checked by `kvpeer.wire.packing` before use.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec

from kvpeer.model import AGENT_ID_BYTES, N_PARTITIONS

__all__ = [
    "EXTENTS_TOLD_MAX",
    "INSPECTED_PAGES_MAX",
    "PAGE_HASH_BYTES",
    "RAILS_MAX",
    "SUBJECT_CHARS_MAX",
    "TRACED_HOLDERS_MAX",
    "TRACES_MAX",
    "UPDATES_MAX",
    "Abandon",
    "AgentInfo",
    "Applied",
    "Apply",
    "Canary",
    "CanaryRead",
    "ClientHello",
    "ClientMessage",
    "ClientWelcome",
    "Commit",
    "Committed",
    "CorruptReport",
    "DataAdmission",
    "Digests",
    "DigestsChecked",
    "Extents",
    "Fetch",
    "Fetched",
    "Gossip",
    "Holders",
    "Inspect",
    "Inspected",
    "Locate",
    "Located",
    "Lookup",
    "MemberUpdate",
    "Message",
    "Ok",
    "OpenData",
    "OpenQueuePair",
    "PeerHello",
    "PeerMessage",
    "PeerWelcome",
    "Ping",
    "PingAck",
    "PingRequest",
    "PolicyTold",
    "Promote",
    "Promoted",
    "QueuePairOpened",
    "ReadExtents",
    "Refusal",
    "RefusalCode",
    "Release",
    "Repair",
    "RequestTrace",
    "Reserve",
    "Reserved",
    "Reset",
    "StaleReport",
    "Synced",
    "Touch",
    "Traced",
]


WELCOME_MEMBERS_MAX = 4096
"""Members in one PeerWelcome: above what a cluster may have. Bounds the objects that one frame can make us build."""

UPDATES_MAX = 1024
"""Rumours in one message; SWIM piggybacks a few dozen."""

DESCRIPTION_FIELDS_MAX = 256
"""Fields of a namespace's description; an engine gives some twenty. A frame full of them would cost twenty times its
size."""

ERROR_CHARACTERS_MAX = 1000
"""Of a doctor's answer; it is for people."""

WAIT_MS_MAX = 600_000
"""As long as a request may take at all."""

EXTENTS_MAX = 1 << 18
"""Extents that slot numbers of 32 bits can name."""

EXTENTS_TOLD_MAX = 4096
"""Extents in one answer: 128 KiB, and a pool of 256 GiB by default."""

VARIABLES_MAX = 64
"""Variables of a policy; an engine has four that may change while it runs."""

SUBJECT_CHARS_MAX = 256
"""Of a question about a request or a key: what an agent keeps of a request's id."""

INSPECTED_PAGES_MAX = 4096
"""Pages in one question: a prompt of 65,000 tokens in pages of 16."""

PAGE_HASH_BYTES = 32
"""Of a page's hash, as engines make it, in a question about a prompt."""

TRACES_MAX = 256
"""Traces in one message: a second of a busy engine, 50 KiB."""

TRACED_HOLDERS_MAX = 16
"""Producers that a trace names: as many as an answer to a Locate offers."""

RAILS_MAX = 16
"""Rails of an agent: hosts have eight NICs for their GPUs, or sixteen ports."""

_Rail = Annotated[int, msgspec.Meta(ge=0, lt=RAILS_MAX)]
_QueuePairEnd = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Id = Annotated[bytes, msgspec.Meta(min_length=AGENT_ID_BYTES, max_length=AGENT_ID_BYTES)]
_Name = Annotated[str, msgspec.Meta(max_length=253)]  # as long as a DNS name
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Counter = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Subject = Annotated[str, msgspec.Meta(max_length=SUBJECT_CHARS_MAX)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base: array-like (compact, append-only) and immutable."""


# ---- answers that both channels share --------------------------------------------------------------------------------


class Ok(Message, frozen=True, tag=60):
    """Done, nothing to say."""


class RefusalCode(str, Enum):
    """Why a request was refused. New codes may appear: who receives an unknown one treats it as REFUSED."""

    BUSY = "busy"
    """A named limit is reached; the same request may succeed later."""
    FAULTY = "faulty"
    """The request breaks the protocol."""
    UNSUPPORTED = "unsupported"
    """This side does not serve such a message."""
    LATE = "late"
    """The deadline passed while the request was being served."""
    CLOSING = "closing"
    """This side ends the connection in an orderly way (an error frame with id 0). What it has not answered, it has not
    served."""
    NOT_READY = "not_ready"
    """The answering side is still starting or already ending."""
    REFUSED = "refused"
    """Understood, and not allowed."""
    INTERNAL = "internal"
    """A fault of the answering side; it is in its log."""


class Refusal(Message, frozen=True, tag=61):
    """The request was not served. `code` is a RefusalCode, `message` is for people."""

    code: str
    message: str


class Inspect(Message, frozen=True, tag=62):
    """Asks an agent what it knows, for people. topic `status`; `explain`: of the request, or the key in hex, that
    `subject` names, or of the pages with these `keys` (packed); `prompt`: of the pages with these hashes (32 bytes
    each) in the namespace whose digest begins, in hex, with `subject`. Answer: Inspected. The first message of a
    connection to the client socket may be one instead of a hello; the agent then asks the other members, and closes."""

    topic: _Name
    subject: _Subject = ""
    keys: Annotated[bytes, msgspec.Meta(max_length=INSPECTED_PAGES_MAX * PAGE_HASH_BYTES)] = b""


class Inspected(Message, frozen=True, tag=63):
    """JSON in UTF-8. Between agents of different releases fields may be missing or new."""

    report: bytes


# ---- between agents --------------------------------------------------------------------------------------------------


class AgentInfo(Message, frozen=True, tag=1):
    """Who an agent is and where it listens. The address of a member never comes from anywhere but this."""

    agent_id: _Id
    name: _Name
    host: _Name
    control_port: _Port
    data_port: _Port


class PeerHello(Message, frozen=True, tag=2):
    """First frame of a connection, after TLS. The certificate must name the same cluster and agent."""

    cluster: _Name
    info: AgentInfo


class PeerWelcome(Message, frozen=True, tag=3):
    """Answer to PeerHello; `members` are all members known alive, so that one seed is enough."""

    cluster: _Name
    info: AgentInfo
    members: Annotated[list[AgentInfo], msgspec.Meta(max_length=WELCOME_MEMBERS_MAX)]


class MemberUpdate(Message, frozen=True, tag=4):
    """One SWIM rumour. `refutation` is SWIM's counter, raised by the member itself; it never voids records.
    state: 1 alive, 2 suspect, 3 dead, 4 left, 5 draining."""

    info: AgentInfo
    state: Annotated[int, msgspec.Meta(ge=1, le=5)]
    refutation: _Counter


_Updates = Annotated[list[MemberUpdate], msgspec.Meta(max_length=UPDATES_MAX)]


class Ping(Message, frozen=True, tag=5):
    sequence: _Counter
    updates: _Updates


class PingAck(Message, frozen=True, tag=6):
    """`subject` is who is alive: the answering agent, or the target of an indirect probe."""

    sequence: _Counter
    subject: _Id
    updates: _Updates


class PingRequest(Message, frozen=True, tag=7):
    """Probe `target` for me."""

    sequence: _Counter
    target: _Id
    updates: _Updates


class Gossip(Message, frozen=True, tag=8):
    updates: _Updates


class Lookup(Message, frozen=True, tag=9):
    """Who holds these pages? Answer: Holders. `partitions` come from the pages' anchors."""

    keys: bytes
    partitions: bytes


class Holders(Message, frozen=True, tag=10):
    """statuses: u8 per key (0 known, 1 miss, 2 unsure). counts: u8 holders per key. holders: packed HOLDER_DTYPE, one
    after another, whose `agent` indexes `agents` (16 bytes each)."""

    statuses: bytes
    counts: bytes
    agents: bytes
    holders: bytes


class Apply(Message, frozen=True, tag=11):
    """A slice of a producer's ordered stream to one owner: ops u8 (1 put, 2 remove) with packed columns. `sequence` is
    the number of the first op; the next Apply starts at sequence + n. Answer: Applied."""

    sequence: _Counter
    ops: bytes
    keys: bytes
    partitions: bytes
    slots: bytes
    generations: bytes
    lengths: bytes
    tiers: bytes


class Applied(Message, frozen=True, tag=12):
    """next_sequence: what the owner expects next. repair: the partitions (u16) of the owner in which it may not have
    all that the producer holds (after a gap or a change of owners): the producer compares digests and repairs."""

    next_sequence: _Counter
    repair: bytes


class Digests(Message, frozen=True, tag=13):
    """Anti-entropy: the producer's digests (u64) and counts (u32) of these partitions. Answer: DigestsChecked."""

    partitions: bytes
    digests: bytes
    counts: bytes


class DigestsChecked(Message, frozen=True, tag=14):
    """Partitions (u16) whose digest or count differs here: the producer sends a Repair for each."""

    differing: bytes


class Repair(Message, frozen=True, tag=15):
    """All entries of the producer in one partition; replaces what the owner has. Ordered with the Apply stream: it
    takes the one number `sequence` and covers every op before it. Answer: Applied."""

    sequence: _Counter
    partition: Annotated[int, msgspec.Meta(ge=0, lt=N_PARTITIONS)]
    keys: bytes
    slots: bytes
    generations: bytes
    lengths: bytes
    tiers: bytes


class Synced(Message, frozen=True, tag=16):
    """The producer holds nothing in these partitions (u16): a Repair of many empty ones at once. Ordered with the Apply
    stream, where it takes the one number `sequence`. Answer: Applied."""

    sequence: _Counter
    partitions: bytes


class StaleReport(Message, frozen=True, tag=17):
    """A reader found these locations stale: the owner compare-deletes on (producer, slot, generation)."""

    producer: _Id
    keys: bytes
    partitions: bytes
    slots: bytes
    generations: bytes


class Touch(Message, frozen=True, tag=18):
    """A reader used these slots of yours (one-sided reads are invisible to the producer)."""

    slots: bytes
    generations: bytes


class OpenData(Message, frozen=True, tag=19):
    """Asks the producer to admit `n` data connections of the asking agent."""

    n: int


class DataAdmission(Message, frozen=True, tag=20):
    """One-time capabilities (32 bytes each), valid for `expires_ms`."""

    capabilities: bytes
    expires_ms: int


class CorruptReport(Message, frozen=True, tag=21):
    """A notice to the producer: these pages of yours came with a wrong checksum under a valid, unchanged header. It
    looks at its own memory and believes nothing else."""

    keys: bytes
    slots: bytes
    generations: bytes


class Promote(Message, frozen=True, tag=22):
    """Asks the producer to bring these pages from its disk into its pool. It answers what it has after `wait_ms`;
    answer: Promoted."""

    keys: bytes
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)]


class Promoted(Message, frozen=True, tag=23):
    """outcomes u8 per key; slots and generations (u32) are where the page lies in the pool, valid where outcome is
    HIT. MISS: neither in the pool nor on the disk."""

    outcomes: bytes
    slots: bytes
    generations: bytes


class OpenQueuePair(Message, frozen=True, tag=24):
    """Asks the producer for its end, by its rail of this number, of a queue pair to this end of the reader's. Answer:
    QueuePairOpened."""

    reader_end: _QueuePairEnd
    rail: _Rail = 0


class QueuePairOpened(Message, frozen=True, tag=25):
    """The producer's end, which serves READs from now on, and how many rails the producer has. An agent that does not
    send their number has one, and serves by it whatever rail is asked for."""

    producer_end: _QueuePairEnd
    n_rails: Annotated[int, msgspec.Meta(ge=1, le=RAILS_MAX)] = 1


class ReadExtents(Message, frozen=True, tag=26):
    """Asks the producer where its extents from `first` on can be read by its rail of this number. Answer: Extents."""

    first: Annotated[int, msgspec.Meta(ge=0, lt=EXTENTS_MAX)]
    rail: _Rail = 0


class Extents(Message, frozen=True, tag=27):
    """Where the extents from the first one that was asked for lie (32 bytes each, as many as one answer holds), and how
    many extents the producer has."""

    extents: Annotated[bytes, msgspec.Meta(max_length=EXTENTS_TOLD_MAX * 32)]
    n_extents: Annotated[int, msgspec.Meta(ge=0, le=EXTENTS_MAX)]


class Canary(Message, frozen=True, tag=30):
    """One doctor asks another to read its pages as agents do, and to say how it went. Answer: CanaryRead."""


class CanaryRead(Message, frozen=True, tag=31):
    """What came of it: the transport, the median time of reading a small page, the rate of reading a large one; or the
    error that ended it, and zeros."""

    transport: _Name
    latency_ns: _Counter
    rate_bytes_per_s: _Counter
    error: Annotated[str, msgspec.Meta(max_length=ERROR_CHARACTERS_MAX)]


PeerMessage = (
    PeerHello
    | PeerWelcome
    | Ping
    | PingAck
    | PingRequest
    | Gossip
    | Lookup
    | Holders
    | Apply
    | Applied
    | Digests
    | DigestsChecked
    | Repair
    | Synced
    | StaleReport
    | Touch
    | OpenData
    | DataAdmission
    | CorruptReport
    | Promote
    | Promoted
    | OpenQueuePair
    | QueuePairOpened
    | ReadExtents
    | Extents
    | Canary
    | CanaryRead
    | Inspect
    | Inspected
    | Ok
    | Refusal
)


# ---- between a client and its agent ----------------------------------------------------------------------------------


class ClientHello(Message, frozen=True, tag=40):
    """One engine process (scheduler or rank). `namespace` is the digest, `description` what it was made of, for people.
    A scheduler that moves no bytes has part = -1."""

    name: _Name
    namespace: bytes
    description: Annotated[dict[str, str], msgspec.Meta(max_length=DESCRIPTION_FIELDS_MAX)]
    page_bytes: int
    n_parts: int
    part: int
    part_offset: int
    part_bytes: int


class ClientWelcome(Message, frozen=True, tag=41):
    """Comes with two file descriptors (SCM_RIGHTS): payload, headers."""

    agent_id: _Id
    extent_bytes: int
    capacity_bytes: int
    slot_bytes: int
    verify: int
    batch_pages_max: int


class Locate(Message, frozen=True, tag=42):
    """How much of this chain can be had? keys in chain order; `first` is the chain index of keys[0] (it decides the
    anchors), `anchors` the anchor key of each group of 32 that the keys touch (packed, 16 bytes each), or nothing:
    each page is its own anchor."""

    request: str
    first: int
    keys: bytes
    anchors: bytes


class Located(Message, frozen=True, tag=43):
    """statuses u8 per key: 0 miss, 1 in the own pool, 2 at a peer. `reason` names why the rest is missing (closed
    list). `producers` (16 bytes each): at most 16 of those that pages at peers could be pulled from; with one of them
    and the own pool alone the first `reaches` (u32 each) keys can be had; `in_flight` (u32 each): fetches from it that
    this agent has under way."""

    statuses: bytes
    reason: str
    producers: bytes = b""
    reaches: bytes = b""
    in_flight: bytes = b""


class Fetch(Message, frozen=True, tag=44):
    """Make these pages resident in the own pool and pin them. Answer by the deadline: Fetched. `source`: the producer
    to ask first for what is not there, if it has the first of it; or nothing."""

    request: str
    first: int
    keys: bytes
    anchors: bytes
    source: bytes = b""


class Fetched(Message, frozen=True, tag=45):
    """outcomes u8 per key; slots, generations (u32) and payload offsets (u64) are valid where outcome is HIT, until
    Release(pin) or `pin_ms` later."""

    outcomes: bytes
    slots: bytes
    generations: bytes
    offsets: bytes
    pin: int
    pin_ms: int


class Release(Message, frozen=True, tag=46):
    """The copy is done. `bad_slots`: slots whose copy was stale or corrupt, for quarantine (u32, with their outcomes
    u8)."""

    pin: int
    bad_slots: bytes
    bad_outcomes: bytes


class Reserve(Message, frozen=True, tag=47):
    """Room for these pages, please: all ranks of a pod ask with the same keys and get the same slots."""

    first: int
    keys: bytes
    anchors: bytes


class Reserved(Message, frozen=True, tag=48):
    """statuses u8 per key: 0 write it (slots, generations, offsets valid), 1 already there, 2 no room."""

    statuses: bytes
    slots: bytes
    generations: bytes
    offsets: bytes


class Commit(Message, frozen=True, tag=49):
    """This rank's part of these slots is written, with these CRC-64 checksums (u64)."""

    slots: bytes
    generations: bytes
    checksums: bytes


class Committed(Message, frozen=True, tag=50):
    """statuses u8 per slot: 0 accepted, 1 unknown or expired reservation (nothing is published)."""

    statuses: bytes


class Abandon(Message, frozen=True, tag=51):
    """The client will not write these slots, and no copy into them is running."""

    slots: bytes
    generations: bytes


class Reset(Message, frozen=True, tag=52):
    """Withdraw everything that was published under the client's namespace (the engine reset its prefix cache)."""

    reason: str


class PolicyTold(Message, frozen=True, tag=53):
    """A notice to the client, after its hello and whenever it changes: the policy of this pod's engine, as the
    cluster's operator told it. `variables`: by the names that the adapter reads from its environment, in the place of
    what it found there. Those of other adapters mean nothing to it."""

    revision: _Counter
    policy: _Name
    variables: Annotated[dict[_Name, _Name], msgspec.Meta(max_length=VARIABLES_MAX)]


class RequestTrace(Message, frozen=True, tag=54):
    """What an engine did with one request. All tokens count from the prompt's beginning: the engine itself had
    `local_tokens`, with the own pool's pages `resident_tokens`, with those of peers `reachable_tokens`; `holders` (16
    bytes each) are producers with whose pages it would reach `reaches` (u32 each). `reason`: of the decision, or why
    there was none, by its name in `core/advice.py`; `source` was to be asked first for the `n_tokens` that were wanted.
    `pull_us` and `prefill_us` are estimates, 0 where there are none. `outcome`: what came of it; `loaded_tokens` were
    loaded in `load_us`. `age_us`: how long ago, when it was sent, the decision was."""

    request: _Subject
    prompt_tokens: _Counter
    page_tokens: _Counter
    page_bytes: _Counter
    local_tokens: _Counter
    resident_tokens: _Counter
    reachable_tokens: _Counter
    holders: Annotated[bytes, msgspec.Meta(max_length=TRACED_HOLDERS_MAX * AGENT_ID_BYTES)]
    reaches: Annotated[bytes, msgspec.Meta(max_length=TRACED_HOLDERS_MAX * 4)]
    lookup_us: _Counter
    lookup_reason: _Name
    reason: _Name
    n_tokens: _Counter
    wait_us: _Counter
    source: Annotated[bytes, msgspec.Meta(max_length=AGENT_ID_BYTES)]
    pull_us: _Counter
    pull_deviation_us: _Counter
    prefill_us: _Counter
    are_costs_known: bool
    outcome: _Name
    loaded_tokens: _Counter
    load_us: _Counter
    age_us: _Counter


class Traced(Message, frozen=True, tag=55):
    """A notice: what became of requests since the last one; `n_dropped` more were not kept."""

    traces: Annotated[list[RequestTrace], msgspec.Meta(max_length=TRACES_MAX)]
    n_dropped: _Counter


ClientMessage = (
    ClientHello
    | ClientWelcome
    | Locate
    | Located
    | Fetch
    | Fetched
    | Release
    | Reserve
    | Reserved
    | Commit
    | Committed
    | Abandon
    | Reset
    | PolicyTold
    | Traced
    | Inspect
    | Inspected
    | Ok
    | Refusal
)
