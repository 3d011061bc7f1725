// Reading and writing live slot headers: one writer (the agent), any number of readers in any process.
//
// A header and its part table are written and read as 64-bit words. The writer clears the first word (magic), stores the rest,
// and stores the first word last; each store is a release. A reader copies the header, the part table and the header again;
// each load is an acquire. A reader that met any word of a newer write therefore sees the first word cleared or the newer
// header in its second look, and the two looks differ. The checksums then stand against damage, not against races.
#pragma once

#include <cstdint>

#include "kvpeer/kvpeer.h"

namespace kvpeer {

constexpr std::uint8_t kSlotHeaderVersion = 1;

// Copies a live header to `out`, and its part table to `parts_out` (room for KVP_PARTS_MAX; may be null: the table is then neither
// read nor checked). Returns true when the copy is one that the writer wrote: magic, version, checksums and n_parts hold and
// nothing changed meanwhile. Tries twice, then false. The loads are ordered after all earlier loads of this thread, so that
// "copy_header, read payload, copy_header" is a valid check of the payload.
bool copy_header(const kvp_slot_header *live, kvp_slot_header &out, kvp_part *parts_out) noexcept;

// True when a copied header is committed and says exactly this location. Pointers to 16 bytes each.
bool header_matches(const kvp_slot_header &header, const std::uint8_t *key, const std::uint8_t *run_id,
                    std::uint32_t generation, std::uint32_t length) noexcept;

// True when two copies are equal in every byte.
bool same_header(const kvp_slot_header &first, const kvp_slot_header &second) noexcept;

// Fills in magic, version and both checksums of a header whose other fields are set. `parts`: n_parts entries.
void seal_header(kvp_slot_header &header, const kvp_part *parts) noexcept;

// Replaces a live header and the first n_parts entries of its table. For the one writer.
void write_header(kvp_slot_header *live, const kvp_slot_header &next, const kvp_part *parts) noexcept;

// Orders all earlier stores of this thread before everything that follows.
void order_header_writes() noexcept;

}  // namespace kvpeer
