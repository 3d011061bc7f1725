/* What the data plane is measured against: the least that could move the same bytes. Used by `kvpeer bench` only.
 *
 * A library of its own, so that nothing of it is in libkvpeer.so, and not a program, so that product and reference take turns
 * in one process, on the same memory, within milliseconds of each other. Nothing here verifies, times out or survives anything:
 * that is what the product adds and the benchmark weighs.
 *
 * Functions return 0, or an errno. Arrays belong to the caller and are not kept.
 */
#ifndef KVPEER_BENCH_REFERENCE_H
#define KVPEER_BENCH_REFERENCE_H

#include <stdint.h>

#define KVB_API __attribute__((visibility("default")))

/* n_pages * n_pieces times memcpy of piece_bytes, in order. */
KVB_API void kvb_copy(uint64_t n_pages, uint64_t n_pieces, void *const *to, const void *const *from, uint64_t piece_bytes);

/* A checksum to go on with: kvp_crc64. */
typedef uint64_t (*kvb_checksum)(uint64_t so_far, const void *data, uint64_t n_bytes);

/* The same, and after each page a pass of the checksum over it, while it is in the cache as far as it fits. The pieces of a page
 * lie one after another at `to`. */
KVB_API void kvb_copy_and_sum(uint64_t n_pages, uint64_t n_pieces, void *const *to, const void *const *from, uint64_t piece_bytes,
                              kvb_checksum checksum, uint64_t *sums);

/* One TCP connection over 127.0.0.1 between the caller, who reads, and a thread, which writes what it is asked for. */
typedef struct kvb_loopback kvb_loopback;

KVB_API int kvb_loopback_open(kvb_loopback **out);
/* Asks for n pages of page_bytes that lie at `from` and reads them to `to`: one small request, then writev against readv.
 * For one thread at a time. */
KVB_API int kvb_loopback_fetch(kvb_loopback *loopback, uint64_t n, void *const *to, const void *const *from, uint64_t page_bytes);
KVB_API void kvb_loopback_close(kvb_loopback *loopback);

#endif
