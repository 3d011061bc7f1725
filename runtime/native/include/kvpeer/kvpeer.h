/* kvpeer native data plane: the C API.
 *
 * Everything that touches page bytes, and the directory table, lives behind these functions. The callers are Python (ctypes,
 * which drops the GIL for the whole call) and the native tests. Rules that hold for every function:
 *
 *   - No exception and no C++ type crosses this boundary. Functions return 0 or a negative KVP_E* code unless they say otherwise;
 *     per-page results are kvp_outcome bytes in an array given by the caller.
 *   - Arrays are given as pointer + count, are owned by the caller and are not kept after the return.
 *   - Integers in memory formats are little endian. Times are CLOCK_MONOTONIC nanoseconds (deadline_ns, absolute).
 *   - Handles are opaque. Destroying a handle while another thread is inside a call on it is a caller's bug unless stated.
 */
#ifndef KVPEER_KVPEER_H
#define KVPEER_KVPEER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVP_API __attribute__((visibility("default")))

#define KVP_ABI_VERSION 3

#define KVP_KEY_BYTES 16
#define KVP_AGENT_ID_BYTES 16
#define KVP_CAPABILITY_BYTES 32
#define KVP_PARTS_MAX 64
#define KVP_HEADER_BYTES 64
#define KVP_PART_ENTRY_BYTES 16
/* One slot's share of the header mapping: header + full part table. */
#define KVP_HEADER_STRIDE (KVP_HEADER_BYTES + KVP_PARTS_MAX * KVP_PART_ENTRY_BYTES)
/* Slot ids are extent * KVP_SLOTS_PER_EXTENT + index, whatever the size class. Smallest slot = extent_bytes / this. */
#define KVP_SLOTS_PER_EXTENT 16384
#define KVP_EXTENTS_MAX 262144 /* slot ids have 32 bits */
#define KVP_RAILS_MAX 16       /* connections of one fetch: hosts have eight NICs for their GPUs, or sixteen ports */
#define KVP_PARTITIONS 4096
#define KVP_HOLDERS_MAX 16

enum kvp_error {
  KVP_OK = 0,
  KVP_EINVAL = -1,   /* an argument breaks the contract; nothing was done */
  KVP_ENOMEM = -2,   /* memory or address space exhausted */
  KVP_ESYS = -3,     /* a system call failed: kvp_last_errno() */
  KVP_ETIMEOUT = -4, /* the deadline passed */
  KVP_ECLOSED = -5,  /* the other side closed, or the handle is closed */
  KVP_EREFUSED = -6, /* the other side refused the capability */
  KVP_EPROTO = -7,   /* the other side broke the protocol */
  KVP_EFULL = -8,    /* a named limit is reached */
  KVP_ENODEVICE = -9 /* this machine has no usable RDMA device; the text that comes with it says what is missing */
};

/* Outcome of one page of a fetch. Values equal kvpeer.model.Outcome. */
enum kvp_outcome {
  KVP_HIT = 0,
  KVP_MISS = 1,
  KVP_STALE = 2,   /* key, run id, generation, length or state differ from the location, before or after the copy */
  KVP_CORRUPT = 3, /* payload checksum differs under a valid and unchanged header */
  KVP_TIMEOUT = 4,
  KVP_REFUSED = 5
};

enum kvp_slot_state { KVP_SLOT_FREE = 0, KVP_SLOT_WRITING = 1, KVP_SLOT_COMMITTED = 2, KVP_SLOT_WITHDRAWN = 3 };

enum kvp_verify { KVP_VERIFY_GENERATION = 1, KVP_VERIFY_FULL = 2 };

enum kvp_checksum_algorithm { KVP_CRC64_NVME = 1 };

/* Slot header, 64 bytes, at slot * KVP_HEADER_STRIDE of the header mapping (docs/formats.md has the byte table). */
typedef struct {
  uint32_t magic;          /* KVP_SLOT_MAGIC */
  uint8_t version;         /* 1 */
  uint8_t state;           /* kvp_slot_state */
  uint16_t n_parts;        /* 1..64; 0 unless committed */
  uint32_t generation;     /* counts reuses of the slot; never 0 for a slot in use */
  uint32_t length;         /* page bytes: sum of the parts */
  uint8_t key[16];
  uint8_t run_id[16];      /* the agent's id: a header of an earlier run never verifies */
  uint8_t checksum_algorithm;
  uint8_t reserved[3];     /* zero */
  uint32_t slot_bytes;     /* size of the slots of this extent, from which the place of the payload follows */
  uint32_t table_checksum; /* low 32 bits of CRC-64/NVME over the n_parts entries */
  uint32_t header_checksum;/* low 32 bits of CRC-64/NVME over bytes 0..59 */
} kvp_slot_header;

#define KVP_SLOT_MAGIC 0x5350564bu /* "KVPS" */

typedef struct {
  uint32_t offset; /* from the start of the slot's payload */
  uint32_t length;
  uint64_t checksum;
} kvp_part;

/* ---- errors, build ------------------------------------------------------------------------------------------------ */

KVP_API uint32_t kvp_abi_version(void);
KVP_API int kvp_last_errno(void);           /* errno of this thread's last KVP_ESYS */
KVP_API const char *kvp_build_info(void);   /* static string: version, compiler, sanitizer, checksum path in use */

/* ---- checksum and copy -------------------------------------------------------------------------------------------- */

/* CRC-64/NVME (reflected polynomial 0x9a6c9329ac4bc9b5, init and xorout all ones; "123456789" -> 0xae8b14860a799888).
 * crc is 0 for the first call, the previous result to go on. */
KVP_API uint64_t kvp_crc64(uint64_t crc, const void *data, uint64_t n_bytes);
/* memcpy and checksum in one pass; regions must not overlap. */
KVP_API uint64_t kvp_copy_crc64(uint64_t crc, void *dst, const void *src, uint64_t n_bytes);
/* Chooses an implementation: 0 automatic, 1 table, 2 pclmul, 3 vpclmul. KVP_EINVAL where the CPU lacks it. For tests and benchmarks. */
KVP_API int kvp_crc64_select(int implementation);

/* ---- pool (agent) -------------------------------------------------------------------------------------------------- */

typedef struct kvp_pool kvp_pool;

/* Two sealed memfds: payload (capacity rounded down to whole extents; SHRINK|GROW|SEAL) and headers
 * (SHRINK|GROW|FUTURE_WRITE|SEAL: clients can map them only for reading). Nothing is touched yet.
 * hugepage_bytes: 0, 2 MiB or 1 GiB. */
KVP_API int kvp_pool_create(uint64_t capacity_bytes, uint64_t extent_bytes, uint64_t hugepage_bytes, const uint8_t run_id[16],
                            kvp_pool **out);
KVP_API void kvp_pool_destroy(kvp_pool *pool);
KVP_API int kvp_pool_fds(const kvp_pool *pool, int *payload_fd, int *header_fd); /* owned by the pool */
KVP_API uint64_t kvp_pool_n_extents(const kvp_pool *pool);
/* Faults the extent's payload in (blocking; charged to this process) so that no later write can fault. Idempotent. */
KVP_API int kvp_pool_touch_extent(kvp_pool *pool, uint32_t extent);
/* Gives an extent to a size class (slot_bytes: multiple of 4096, >= extent_bytes / KVP_SLOTS_PER_EXTENT). All of the extent's
 * headers must be FREE or WITHDRAWN. Faults the headers in, so that writing them cannot fault later. Native servers resolve
 * slot -> address with this table. */
KVP_API int kvp_pool_assign_extent(kvp_pool *pool, uint32_t extent, uint32_t slot_bytes);
/* First byte and size of the payload mapping; the bytes of an extent may be used once it was touched. */
KVP_API void *kvp_pool_payload(const kvp_pool *pool, uint64_t *n_bytes);
/* Address of a slot's payload in this process, or NULL when the slot does not exist. */
KVP_API void *kvp_pool_slot_address(const kvp_pool *pool, uint32_t slot);

/* Header writes, n slots at a time; the caller (the agent) is the only writer. A reader that copies a header while it is written
 * sees a checksum mismatch, never a mixture that verifies. On return the writes are ordered before anything the caller does next.
 * writing: the generation differs from the slot's last one. committed: the slot is being written under this generation; the parts are
 * not empty and lie in the slot. withdrawn: the slot is in use under this generation. Anything else is KVP_EINVAL for the whole batch.
 * Header and table of a slot that is not committed say n_parts 0, length 0 and key 0. */
KVP_API int kvp_pool_mark_writing(kvp_pool *pool, uint64_t n, const uint32_t *slots, const uint32_t *generations);
KVP_API int kvp_pool_mark_committed(kvp_pool *pool, uint64_t n, const uint32_t *slots, const uint32_t *generations,
                                    const uint8_t *keys /* n*16 */, uint32_t n_parts, const kvp_part *parts /* n*n_parts */);
KVP_API int kvp_pool_mark_withdrawn(kvp_pool *pool, uint64_t n, const uint32_t *slots, const uint32_t *generations);

/* Computes the checksums of a page again where it lies, as a reader would of its copy. Returns a kvp_outcome: KVP_HIT when its bytes are
 * right, KVP_CORRUPT when they are not under a valid and unchanged header, KVP_STALE when the slot does not hold this page (any more).
 * Any thread, also while others mark slots. */
KVP_API int kvp_pool_check(const kvp_pool *pool, uint32_t slot, uint32_t generation, const uint8_t key[16]);

/* ---- mapping (client) and the shm transport -------------------------------------------------------------------------- */

typedef struct kvp_map kvp_map;

/* Maps an agent's pool in a client process: payload read-write, headers read-only, both MADV_DONTFORK. The fds may be closed
 * afterwards. run_id is what every header must carry. Files of a wrong size or without F_SEAL_SHRINK are KVP_EINVAL. */
KVP_API int kvp_map_create(int payload_fd, int header_fd, uint64_t extent_bytes, const uint8_t run_id[16], kvp_map **out);
KVP_API void kvp_map_destroy(kvp_map *map);
KVP_API void *kvp_map_payload(const kvp_map *map, uint64_t *n_bytes);

/* The engine's memory as n_segments strided arrays: block b of segment s is at base[s] + b * stride[s], length[s] bytes.
 * A page part is the concatenation of its segments. */
typedef struct {
  uint32_t n_segments;
  const uint64_t *base;
  const uint64_t *stride;
  const uint32_t *length;
} kvp_layout;

/* Publish: engine blocks -> slots. offsets[i] is the slot's byte offset in the payload mapping, part_offset the part's place in
 * the page. checksums[i] receives the part's CRC-64. Ends with a store fence. */
KVP_API int kvp_map_gather(kvp_map *map, uint64_t n, const uint64_t *offsets, uint32_t part_offset, const kvp_layout *layout,
                           const int64_t *blocks, uint64_t *checksums);
/* Fetch on the same host: slots -> engine blocks, verified before (header) and after (header again; payload checksum when FULL).
 * outcomes[i] is HIT, STALE or CORRUPT; the blocks of anything but HIT hold unspecified bytes. part: this rank's index. */
KVP_API int kvp_map_scatter(kvp_map *map, uint64_t n, const uint32_t *slots, const uint32_t *generations, const uint64_t *offsets,
                            const uint8_t *keys, uint32_t part, const kvp_layout *layout, const int64_t *blocks, int verify,
                            uint8_t *outcomes);
/* Checksums of a range of n slots, for parts that a device copied in. */
KVP_API int kvp_map_checksum(kvp_map *map, uint64_t n, const uint64_t *offsets, uint32_t part_offset, uint32_t part_length,
                             uint64_t *checksums);

/* ---- tcp: serving --------------------------------------------------------------------------------------------------- */

typedef struct kvp_server kvp_server;

typedef struct {
  uint32_t connections_max;  /* further ones are closed at accept and counted */
  uint32_t pages_max;        /* per request frame */
  uint32_t idle_timeout_ms;  /* a connection without a request for this long is closed */
  uint32_t io_timeout_ms;    /* a peer that takes this long for one send is dropped */
  uint32_t handshake_timeout_ms;
} kvp_server_limits;

typedef struct {
  uint64_t connections_open, connections_accepted, connections_refused, protocol_errors;
  uint64_t requests, pages_sent, pages_stale, bytes_sent, io_timeouts;
} kvp_server_stats;

/* Serves the pool's committed slots to admitted readers on native threads. bind_ip is a numeric address; port 0 picks one. The
 * pool must outlive the server. */
KVP_API int kvp_server_start(kvp_pool *pool, const char *bind_ip, uint16_t port, const kvp_server_limits *limits,
                             kvp_server **out, uint16_t *port_out);
/* Admits ONE connection that presents this capability before expires_ns and names reader_id. */
KVP_API int kvp_server_admit(kvp_server *server, const uint8_t capability[32], const uint8_t reader_id[16], uint64_t expires_ns);
/* Closes every connection of a reader and forgets its capabilities. */
KVP_API int kvp_server_revoke(kvp_server *server, const uint8_t reader_id[16]);
KVP_API void kvp_server_get_stats(const kvp_server *server, kvp_server_stats *out);
/* Stops accepting, closes connections, joins all threads (bounded by io_timeout_ms), frees. */
KVP_API void kvp_server_stop(kvp_server *server);

/* ---- tcp: fetching --------------------------------------------------------------------------------------------------- */

typedef struct kvp_conn kvp_conn;

KVP_API int kvp_conn_open(const char *ip, uint16_t port, const uint8_t capability[32], const uint8_t reader_id[16],
                          const uint8_t producer_id[16], uint64_t deadline_ns, kvp_conn **out);
/* Pages that one fetch may ask for: what the producer allows, within this library's own limit. */
KVP_API uint32_t kvp_conn_pages_max(const kvp_conn *conn);
/* Fetches n pages into destinations (each lengths[i] bytes of this process's memory). One request frame (n <= pages_max).
 * Verified as design says: header before, header after, payload checksum when FULL. parts_out[i * KVP_PARTS_MAX ...] and
 * n_parts_out[i] receive the producer's part table of each HIT.
 * Returns KVP_OK when every page has an outcome from the producer. Any other return has closed the connection: nothing will be
 * written to the destinations after the return; pages not answered have outcome TIMEOUT (at the deadline) or MISS. */
KVP_API int kvp_conn_fetch(kvp_conn *conn, uint64_t n, const uint32_t *slots, const uint32_t *generations, const uint8_t *keys,
                           const uint32_t *lengths, void *const *destinations, int verify, uint64_t deadline_ns,
                           kvp_part *parts_out, uint16_t *n_parts_out, uint8_t *outcomes);
/* Thread-safe: makes a fetch in another thread return KVP_ECLOSED soon. The handle stays valid until kvp_conn_free. */
KVP_API void kvp_conn_shutdown(kvp_conn *conn);
KVP_API void kvp_conn_free(kvp_conn *conn);

/* ---- verbs: one-sided READs ------------------------------------------------------------------------------------------ */

/* One RDMA device (a rail) and what a pool shows through it: payload and headers of its extents, registered for remote READ and
 * nothing else, when they are first asked for. libibverbs is loaded at the first kvp_verbs_open; a machine without it gets
 * KVP_ENODEVICE. All functions are thread-safe but kvp_verbs_close. */
typedef struct kvp_verbs kvp_verbs;

typedef struct {
  const char *device;              /* its name, or empty: the first that has an active port with a usable address */
  int32_t gid_index;               /* of the port's table; negative: RoCE v2 and routable, IPv4 first; never link-local */
  uint32_t connections_max;        /* served at a time; further readers are KVP_EFULL */
  uint32_t reader_connections_max; /* of one reader; a further one replaces its oldest */
} kvp_verbs_settings;

/* One end of a queue pair, as the other end must know it; 32 bytes (docs/formats.md). */
typedef struct {
  uint8_t gid[16];
  uint32_t qp_number;
  uint32_t psn;
  uint16_t lid;
  uint8_t mtu;       /* enum ibv_mtu */
  uint8_t reads_max; /* READs under way at a time: that the reader starts, that the producer serves */
  uint32_t reserved; /* zero */
} kvp_verbs_endpoint;

/* Where the pages of an extent can be read; 32 bytes (docs/formats.md). */
typedef struct {
  uint64_t payload_address; /* of slot 0 */
  uint64_t header_address;  /* of slot 0, with its part table; KVP_HEADER_STRIDE to the next */
  uint32_t payload_key;
  uint32_t header_key;
  uint32_t slot_bytes; /* 0: nothing to read here (yet) */
  uint32_t n_slots;
} kvp_verbs_extent;

typedef struct {
  uint64_t connections_open, connections_accepted, connections_replaced, registered_bytes;
} kvp_verbs_stats;

/* Opens a device for this pool, which must outlive it. With KVP_ENODEVICE, `reason` (a text of at most reason_bytes) says what is
 * missing. */
KVP_API int kvp_verbs_open(kvp_pool *pool, const kvp_verbs_settings *settings, char *reason, uint64_t reason_bytes, kvp_verbs **out);
/* Closes connections that are served, takes the registrations back and frees. Reading connections must be freed before. */
KVP_API void kvp_verbs_close(kvp_verbs *verbs);
KVP_API const char *kvp_verbs_device(const kvp_verbs *verbs); /* its name */
/* Registers memory beyond the pool as a destination of READs (local writes only), until it is unregistered. */
KVP_API int kvp_verbs_register(kvp_verbs *verbs, void *address, uint64_t n_bytes);
KVP_API int kvp_verbs_unregister(kvp_verbs *verbs, void *address);
/* What readers may be told of extents [first, first + n): out [n]. Registers what is assigned by now. Returns how many there are. */
KVP_API int64_t kvp_verbs_extents(kvp_verbs *verbs, uint32_t first, uint64_t n, kvp_verbs_extent *out);
/* The producer's end of a new queue pair, ready to serve the reader's. */
KVP_API int kvp_verbs_accept(kvp_verbs *verbs, const uint8_t reader_id[16], const kvp_verbs_endpoint *reader,
                             kvp_verbs_endpoint *producer_out);
/* Ends every connection that a reader reads by. */
KVP_API int kvp_verbs_revoke(kvp_verbs *verbs, const uint8_t reader_id[16]);
KVP_API void kvp_verbs_get_stats(const kvp_verbs *verbs, kvp_verbs_stats *out);

/* A reader's end. Life: create, connect, learn, then fetches, one at a time; freed before its kvp_verbs. */
typedef struct kvp_verbs_conn kvp_verbs_conn;

KVP_API int kvp_verbs_conn_create(kvp_verbs *verbs, const uint8_t producer_id[16], kvp_verbs_endpoint *reader_out,
                                  kvp_verbs_conn **out);
KVP_API int kvp_verbs_conn_connect(kvp_verbs_conn *conn, const kvp_verbs_endpoint *producer);
/* Takes over what the producer told of extents [first, first + n); none beyond KVP_EXTENTS_MAX. */
KVP_API int kvp_verbs_conn_learn(kvp_verbs_conn *conn, uint32_t first, uint64_t n, const kvp_verbs_extent *extents);
/* 1 if the extents of all these slots are known, else 0: learn, then fetch. */
KVP_API int kvp_verbs_conn_knows(const kvp_verbs_conn *conn, uint64_t n, const uint32_t *slots);
/* Reads one header of the producer, where extents are known: KVP_OK says that the way works. Any other return has ended the queue pair. */
KVP_API int kvp_verbs_conn_probe(kvp_verbs_conn *conn, uint64_t deadline_ns);
/* As kvp_conn_fetch, for any n, by 1 to KVP_RAILS_MAX different connections to one producer at once: each page goes by the one with the
 * fewest bytes so far. The pages of one that fails go by the others; so do those of one that is silent while another is done, at half of
 * the time that it had. codes [n_conns]: negative says why the connection has ended, 1 that pages came by it, 0 that it had none to bring.
 * Destinations lie in the pool's assigned extents or in memory registered with every device (else KVP_EINVAL). Pages of extents that their connection does not know are STALE. KVP_OK when every page has an outcome of its own. However it
 * returns, nothing will be written to the destinations any more. */
KVP_API int kvp_verbs_fetch(kvp_verbs_conn *const *conns, uint32_t n_conns, int32_t *codes, uint64_t n, const uint32_t *slots,
                            const uint32_t *generations, const uint8_t *keys, const uint32_t *lengths, void *const *destinations,
                            int verify, uint64_t deadline_ns, kvp_part *parts_out, uint16_t *n_parts_out, uint8_t *outcomes);
/* Why the connection ended, as the device says it; a static text, empty if the device said nothing. */
KVP_API const char *kvp_verbs_conn_fault(const kvp_verbs_conn *conn);
/* Thread-safe: makes a fetch in another thread return KVP_ECLOSED soon. */
KVP_API void kvp_verbs_conn_shutdown(kvp_verbs_conn *conn);
KVP_API void kvp_verbs_conn_free(kvp_verbs_conn *conn);

/* ---- directory table -------------------------------------------------------------------------------------------------- */

/* One shard's records, or (with a single agent index) a producer's own published entries. Partitioned; each (agent, partition)
 * has an incremental digest: the XOR over its entries of a 64-bit mix of (key, slot, generation, length, tier), and a count.
 * Not thread-safe. Memory: <= 96 bytes a record with one holder, +32 per further holder, all in. */
typedef struct kvp_dir kvp_dir;

typedef struct {
  uint32_t agent; /* index chosen by the caller, < 65536 */
  uint32_t slot;
  uint32_t generation;
  uint32_t length;
  uint32_t tier;
} kvp_holder;

enum kvp_dir_op { KVP_DIR_PUT = 1, KVP_DIR_REMOVE = 2 };
enum kvp_dir_result {
  KVP_DIR_APPLIED = 0,
  KVP_DIR_UNCHANGED = 1, /* PUT of an equal entry; REMOVE of an entry that is not there or has another (slot, generation) */
  KVP_DIR_FULL = 2,      /* partition_records_max reached, and no room was made: not stored */
  KVP_DIR_HOLDERS_FULL = 3
};

typedef struct {
  uint64_t records, holders, bytes, full_rejections, dropped_holders;
} kvp_dir_stats;

/* makes_room: PUT of a new record into a full partition drops the oldest record of the agent that bears most of them (a record is
 * borne by one of its holders), or of the putting agent itself unless another bears at least two more. A record that has another
 * holder who bears less is handed over instead. KVP_DIR_FULL then means that the agents are at least as many as the places. Costs one
 * pass over the agents of the partition, at most 17 times. Without makes_room, such a PUT is refused. */
KVP_API int kvp_dir_create(uint32_t partition_records_max, int makes_room, kvp_dir **out);
KVP_API void kvp_dir_destroy(kvp_dir *dir);
/* One producer's ops in order. PUT replaces the agent's holder of the key; REMOVE compares (slot, generation). After KVP_ENOMEM
 * a first part of the ops is applied: repair. */
KVP_API int kvp_dir_apply(kvp_dir *dir, uint32_t agent, uint64_t n, const uint8_t *ops, const uint8_t *keys,
                          const uint16_t *partitions, const uint32_t *slots, const uint32_t *generations, const uint32_t *lengths,
                          const uint8_t *tiers, uint8_t *results);
/* alive[agent] != 0 decides which holders count (n_alive entries; agents beyond are dead). counts[i] <= KVP_HOLDERS_MAX holders of
 * key i are written one after another to holders_out (room for holders_max in all; keys that no longer fit get count 0).
 * Returns the number of holders written. */
KVP_API int64_t kvp_dir_lookup(const kvp_dir *dir, uint64_t n, const uint8_t *keys, const uint16_t *partitions,
                               const uint8_t *alive, uint32_t n_alive, uint8_t *counts, kvp_holder *holders_out,
                               uint64_t holders_max);
/* Whose entries the latest kvp_dir_apply or kvp_dir_replace dropped to make room, and where: one item for each entry. Returns how many
 * there are (writes at most room). */
KVP_API int64_t kvp_dir_dropped(const kvp_dir *dir, uint64_t room, uint16_t *agents, uint16_t *partitions);
/* Records in each of these partitions. */
KVP_API int kvp_dir_records(const kvp_dir *dir, uint64_t n, const uint16_t *partitions, uint32_t *records);
KVP_API int kvp_dir_digests(const kvp_dir *dir, uint32_t agent, uint64_t n, const uint16_t *partitions, uint64_t *digests,
                            uint32_t *counts);
/* All entries of an agent in a partition, first of the records that it bears, from the oldest on; returns how many there are (writes
 * at most room). */
KVP_API int64_t kvp_dir_dump(const kvp_dir *dir, uint32_t agent, uint16_t partition, uint64_t room, uint8_t *keys,
                             uint32_t *slots, uint32_t *generations, uint32_t *lengths, uint8_t *tiers);
/* Replaces all of the agent's entries in a partition by the given ones (repair). Those that a limit keeps out are counted in
 * full_rejections and not stored. */
KVP_API int kvp_dir_replace(kvp_dir *dir, uint32_t agent, uint16_t partition, uint64_t n, const uint8_t *keys,
                            const uint32_t *slots, const uint32_t *generations, const uint32_t *lengths, const uint8_t *tiers);
/* Frees a partition that this shard no longer owns. Returns records freed. */
KVP_API int64_t kvp_dir_drop_partition(kvp_dir *dir, uint16_t partition);
/* Removes all entries of an agent from partitions [first, first + n): a sweep in slices. Returns holders freed. */
KVP_API int64_t kvp_dir_sweep(kvp_dir *dir, uint32_t agent, uint32_t first_partition, uint32_t n_partitions);
KVP_API void kvp_dir_get_stats(const kvp_dir *dir, kvp_dir_stats *out);

#ifdef __cplusplus
}
#endif
#endif /* KVPEER_KVPEER_H */
