// The caching allocator: the rules of PyTorch's for CUDA (512 bytes, 1 MiB, 2 MiB, 20 MiB), on memory of the host.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "streams.h"

namespace emulated {

c10::DeviceAllocator* allocator();

void set_memory_fraction(double fraction, int device);
double memory_fraction(int device);
void set_memory(size_t total, int device);
size_t total_memory(int device);
size_t reserved_memory(int device);
void fail_allocation(uint64_t number); // of those from now on; 0: none

// The device whose memory an address belongs to, or -1.
int device_of_address(const void* address);

using BlockAlive = std::tuple<uintptr_t, size_t, int>; // address, bytes requested, stream
std::vector<BlockAlive> blocks_alive(int device);

using TraceEntry = std::tuple<std::string, uintptr_t, size_t, int>; // action, address, bytes, stream
void trace_allocations(bool on);
std::vector<TraceEntry> allocation_trace();

// Memory of graphs: pools of their own, kept until the last graph is gone.
uint64_t retain_pool(uint64_t pool);  // 0: a new one
void release_pool(uint64_t pool);

} // namespace emulated
