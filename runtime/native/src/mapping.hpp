// Owners of one memory file descriptor and of one memory mapping.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpeer {

// A memfd that this object closes.
class MemoryFile {
 public:
  MemoryFile() = default;
  MemoryFile(MemoryFile &&other) noexcept;
  MemoryFile &operator=(MemoryFile &&other) noexcept;
  ~MemoryFile();

  // Creates a memfd of n_bytes; hugepage_bytes is 0 or a huge page size. KVP_OK or a negative code.
  int create(const char *name, std::uint64_t n_bytes, std::uint64_t hugepage_bytes) noexcept;
  // Adds F_SEAL_* bits. KVP_OK or a negative code.
  int seal(int seals) noexcept;
  int fd() const noexcept { return fd_; }

 private:
  int fd_ = -1;
};

// A shared mapping that this object unmaps. Not inherited by forked children.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping &&other) noexcept;
  Mapping &operator=(Mapping &&other) noexcept;
  ~Mapping();

  // Maps the first n_bytes of fd with PROT_* bits. KVP_OK or a negative code.
  int map(int fd, std::uint64_t n_bytes, int protection) noexcept;
  // Faults [offset, offset + n_bytes) in for writing without changing a byte. KVP_OK, KVP_ENOMEM or KVP_ESYS.
  int populate(std::uint64_t offset, std::uint64_t n_bytes) const noexcept;
  std::byte *data() const noexcept { return data_; }
  std::uint64_t n_bytes() const noexcept { return n_bytes_; }

 private:
  std::byte *data_ = nullptr;
  std::uint64_t n_bytes_ = 0;
};

}  // namespace kvpeer
