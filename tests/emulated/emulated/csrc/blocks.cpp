#include "blocks.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstring>

namespace emulated {

namespace {

uintptr_t mapped(size_t bytes, int protection) {
  void* address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "the host has no room for ", bytes, " bytes of emulated memory");
  return reinterpret_cast<uintptr_t>(address);
}

// Fresh memory is garbage as well; large segments only where tensors begin and end, for the sake of the host's memory.
void spoil(uintptr_t address, size_t bytes) {
  const size_t some = std::min(bytes, kLargeBuffer);
  std::memset(reinterpret_cast<void*>(address), kGarbage, some);
  std::memset(reinterpret_cast<void*>(address + bytes - std::min(bytes - some, kRoundLarge)), kGarbage,
              std::min(bytes - some, kRoundLarge));
}

} // namespace

uintptr_t map_segment(size_t bytes) {
  const uintptr_t address = mapped(bytes, PROT_READ | PROT_WRITE);
  spoil(address, bytes);
  return address;
}

void unmap_segment(uintptr_t address, size_t bytes) {
  munmap(reinterpret_cast<void*>(address), bytes);
}

uintptr_t reserve_addresses(size_t bytes) {
  return mapped(bytes, PROT_NONE);
}

void map_pages(uintptr_t address, size_t bytes) {
  TORCH_CHECK(mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) == 0, "mprotect failed");
  spoil(address, bytes);
}

void unmap_pages(uintptr_t address, size_t bytes) {
  madvise(reinterpret_cast<void*>(address), bytes, MADV_DONTNEED);
  mprotect(reinterpret_cast<void*>(address), bytes, PROT_NONE);
}

} // namespace emulated
