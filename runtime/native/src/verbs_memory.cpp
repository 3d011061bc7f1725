#include "verbs_memory.hpp"

#include "errors.hpp"
#include "extent.hpp"

namespace kvpeer::verbs {

Memory::Memory(const Library &library, Pd *pd, const kvp_pool &pool)
    : library_(library), pd_(pd), pool_(pool), extents_(pool.n_extents) {}

int Memory::describe(uint32_t extent, kvp_verbs_extent &out) {
  out = {};
  const uint32_t slot_bytes = pool_.slot_bytes(extent * KVP_SLOTS_PER_EXTENT);
  if (slot_bytes == 0) {
    return KVP_OK;
  }
  const auto n_slots = static_cast<uint32_t>(pool_.extent_bytes / slot_bytes);
  std::lock_guard lock(mutex_);
  if (int rc = register_extent(extent, n_slots); rc != KVP_OK) {
    return rc;
  }
  const Extent &there = extents_[extent];
  out = {reinterpret_cast<uintptr_t>(there.payload->address),
         reinterpret_cast<uintptr_t>(there.headers->address),
         there.payload->remote_key,
         there.headers->remote_key,
         slot_bytes,
         n_slots};
  return KVP_OK;
}

int Memory::local_key(const void *address, uint64_t n_bytes, uint32_t &key) {
  auto *first = const_cast<std::byte *>(static_cast<const std::byte *>(address));
  std::byte *pool_first = pool_.payload().data();
  std::lock_guard lock(mutex_);
  if (first >= pool_first && first < pool_first + pool_.payload().n_bytes()) {
    const auto offset = static_cast<uint64_t>(first - pool_first);
    const auto extent = static_cast<uint32_t>(offset / pool_.extent_bytes);
    const uint32_t slot_bytes = pool_.slot_bytes(extent * KVP_SLOTS_PER_EXTENT);
    if (slot_bytes == 0 || offset % pool_.extent_bytes + n_bytes > pool_.extent_bytes) {
      return KVP_EINVAL;
    }
    if (int rc = register_extent(extent, static_cast<uint32_t>(pool_.extent_bytes / slot_bytes)); rc != KVP_OK) {
      return rc;
    }
    key = extents_[extent].payload->local_key;
    return KVP_OK;
  }
  auto next = added_.upper_bound(first);
  if (next == added_.begin()) {
    return KVP_EINVAL;
  }
  const MemoryRegion &region = *std::prev(next)->second;
  const auto offset = static_cast<uint64_t>(first - static_cast<std::byte *>(region.address));
  if (offset > region.length || n_bytes > region.length - offset) {
    return KVP_EINVAL;
  }
  key = region.local_key;
  return KVP_OK;
}

int Memory::add(void *address, uint64_t n_bytes) {
  std::lock_guard lock(mutex_);
  OwnedRegion region = register_bytes(address, n_bytes, kAccessLocalWrite);
  if (region == nullptr) {
    return failed_system_call();
  }
  return added_.emplace(static_cast<std::byte *>(address), std::move(region)).second ? KVP_OK : KVP_EINVAL;
}

int Memory::remove(void *address) {
  std::lock_guard lock(mutex_);
  return added_.erase(static_cast<std::byte *>(address)) == 1 ? KVP_OK : KVP_EINVAL;
}

uint64_t Memory::registered_bytes() const {
  std::lock_guard lock(mutex_);
  uint64_t n_bytes = 0;
  for (const Extent &extent : extents_) {
    n_bytes += (extent.payload ? extent.payload->length : 0) + (extent.headers ? extent.headers->length : 0);
  }
  for (const auto &[first, region] : added_) {
    n_bytes += region->length;
  }
  return n_bytes;
}

int Memory::register_extent(uint32_t extent, uint32_t n_slots) {
  Extent &there = extents_[extent];
  if (there.payload == nullptr) {
    there.payload = register_bytes(pool_.payload().data() + extent * pool_.extent_bytes, pool_.extent_bytes,
                                   kAccessLocalWrite | kAccessRemoteRead);
  }
  const uint64_t header_bytes = uint64_t{n_slots} * KVP_HEADER_STRIDE;
  if (there.payload != nullptr && (there.headers == nullptr || there.headers->length < header_bytes)) {
    there.headers = nullptr;
    there.headers =
        register_bytes(pool_.headers().data() + extent * kHeaderExtentBytes, header_bytes, kAccessRemoteRead);
  }
  return there.payload != nullptr && there.headers != nullptr ? KVP_OK : failed_system_call();
}

OwnedRegion Memory::register_bytes(void *address, uint64_t n_bytes, int access) const {
  return {library_.reg_mr(pd_, address, n_bytes, access), {&library_}};
}

}  // namespace kvpeer::verbs
