// Pinned host memory: what was registered, and PyTorch's allocator of pinned memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "streams.h"

namespace emulated {

// Raise RuntimeError if the range overlaps registered memory or is not mapped.
void host_register(uintptr_t address, size_t bytes);
// Raise RuntimeError if nothing is registered there, if its pages are gone, or if a stream may still use them.
void host_unregister(uintptr_t address);
bool is_registered(uintptr_t address, size_t bytes);
size_t registered_bytes();
bool is_mapped(uintptr_t address, size_t bytes);

at::HostAllocator* host_allocator();
// A stream uses this pinned memory up to what was given to it now.
void host_memory_used(uintptr_t address, Stream& stream);

// Tell the detector that the host reads or writes; ranges that are not registered are left out.
void host_access(uintptr_t address, size_t bytes, bool write, const std::string& name);

} // namespace emulated
