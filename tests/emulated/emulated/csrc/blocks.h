// Segments and blocks of one device; allocator.cpp puts them together.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "streams.h"

namespace emulated {

constexpr size_t kMinBlock = 512;                // all sizes are rounded to this
constexpr size_t kSmallSize = 1 << 20;           // largest "small" allocation
constexpr size_t kSmallBuffer = 2 << 20;         // "small" allocations are packed in segments of this
constexpr size_t kLargeBuffer = 20 << 20;        // "large" ones may be packed in segments of this, unless it is set
constexpr size_t kMinLargeAllocation = 10 << 20; // from here on an allocation has a segment of its own,
constexpr size_t kRoundLarge = 2 << 20;          // rounded to this

struct Pool;

// The large_segment_size_mb of PYTORCH_ALLOC_CONF, where this PyTorch has it
template <typename Config>
auto large_buffer(int) -> decltype(Config::large_segment_size()) {
  return Config::large_segment_size();
}
template <typename Config>
size_t large_buffer(long) {
  return kLargeBuffer;
}

// Address space of one stream and pool, mapped in pages of the size of a segment.
struct Expandable {
  uintptr_t begin;
  size_t page;
  size_t bytes;
};

struct Block {
  Stream* stream;
  size_t size;
  uintptr_t address;
  Pool* pool;
  size_t requested = 0;
  bool allocated = false;
  bool mapped = true;
  Expandable* expandable = nullptr;
  Block* previous = nullptr;
  Block* next = nullptr;
  std::unordered_set<Stream*> uses; // by record_stream
  int events = 0;                   // of uses, not yet completed
  Clock known;                      // what the host knew when it was freed
  OriginPtr freed_by;

  bool is_split() const {
    return previous || next;
  }
  bool is_free() const {
    return !allocated && events == 0 && uses.empty();
  }
};

struct ByStreamAndSize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream)
      return a->stream->id < b->stream->id;
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const {
    return a->stream != b->stream ? a->stream->id < b->stream->id : a->address < b->address;
  }
};

struct Pool {
  bool small;
  uint64_t graph = 0; // the graph pool that it belongs to
  std::set<Block*, ByStreamAndSize> blocks; // free and mapped
  std::set<Block*, ByAddress> unmapped;
};

struct GraphPool {
  Pool small{true};
  Pool large{false};
  int users = 0;
};

// Memory of a device as its driver hands it out.
uintptr_t map_segment(size_t bytes);
void unmap_segment(uintptr_t address, size_t bytes);
uintptr_t reserve_addresses(size_t bytes);
void map_pages(uintptr_t address, size_t bytes);
void unmap_pages(uintptr_t address, size_t bytes);

constexpr int kGarbage = 0xff; // NaN as a floating number, -1 as an index

} // namespace emulated
