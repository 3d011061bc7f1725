#include "mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <utility>

#include "errors.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace kvpeer {
namespace {

unsigned memfd_flags(std::uint64_t hugepage_bytes) {
  constexpr unsigned kHugeShift = 26;  // MFD_HUGE_SHIFT: log2 of the huge page size goes here
  unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if (hugepage_bytes != 0) {
    flags |= MFD_HUGETLB | (static_cast<unsigned>(std::countr_zero(hugepage_bytes)) << kHugeShift);
  }
  return flags;
}

// Writes each page without changing it: adding zero atomically keeps what another process may be storing there.
void touch_pages(std::byte *first, std::uint64_t n_bytes) {
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  for (std::uint64_t offset = 0; offset < n_bytes; offset += page_bytes) {
    __atomic_fetch_add(reinterpret_cast<std::uint8_t *>(first + offset), 0, __ATOMIC_RELAXED);
  }
}

}  // namespace

MemoryFile::MemoryFile(MemoryFile &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

MemoryFile &MemoryFile::operator=(MemoryFile &&other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

MemoryFile::~MemoryFile() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

int MemoryFile::create(const char *name, std::uint64_t n_bytes, std::uint64_t hugepage_bytes) noexcept {
  MemoryFile file;
  file.fd_ = ::memfd_create(name, memfd_flags(hugepage_bytes));
  if (file.fd_ < 0 || ::ftruncate(file.fd_, static_cast<off_t>(n_bytes)) != 0) {
    return failed_system_call();
  }
  *this = std::move(file);
  return KVP_OK;
}

int MemoryFile::seal(int seals) noexcept {
  return ::fcntl(fd_, F_ADD_SEALS, seals) == 0 ? KVP_OK : failed_system_call();
}

Mapping::Mapping(Mapping &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), n_bytes_(std::exchange(other.n_bytes_, 0)) {}

Mapping &Mapping::operator=(Mapping &&other) noexcept {
  std::swap(data_, other.data_);
  std::swap(n_bytes_, other.n_bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    ::munmap(data_, n_bytes_);
  }
}

int Mapping::map(int fd, std::uint64_t n_bytes, int protection) noexcept {
  void *address = ::mmap(nullptr, n_bytes, protection, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) {
    return failed_system_call();
  }
  Mapping mapping;
  mapping.data_ = static_cast<std::byte *>(address);
  mapping.n_bytes_ = n_bytes;
  if (::madvise(address, n_bytes, MADV_DONTFORK) != 0) {
    return failed_system_call();
  }
  *this = std::move(mapping);
  return KVP_OK;
}

int Mapping::populate(std::uint64_t offset, std::uint64_t n_bytes) const noexcept {
  std::byte *first = data_ + offset;
  int result;
  do {
    result = ::madvise(first, n_bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) {
    return KVP_OK;
  }
  if (errno != EINVAL) {
    return failed_with(errno == EFAULT ? ENOMEM : errno);  // EFAULT: the file could not grow a page (SIGBUS otherwise)
  }
  touch_pages(first, n_bytes);  // a kernel before 5.14
  return KVP_OK;
}

}  // namespace kvpeer
