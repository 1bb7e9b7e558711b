// Allocation on one device.
#pragma once

#include <deque>

#include "allocator.h"
#include "blocks.h"

namespace emulated {

using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;

void change(StatArray& stat, const Pool& pool, int64_t amount); // of all pools, and of those of its size

// All functions are called with giving() held.
class DeviceMemory {
 public:
  explicit DeviceMemory(int device) : device_(device) {}

  Block* allocate(size_t bytes, Stream& stream);
  void free(Block* block, OriginPtr origin);
  void use(Block* block, Stream& stream); // record_stream
  void empty_cache();
  Block* find(uintptr_t address) const;
  bool contains(uintptr_t address) const;
  std::vector<BlockAlive> alive() const;
  void retain(uint64_t pool);
  void release(uint64_t pool);

  DeviceStats stats;
  size_t total = size_t(8) << 30;
  double fraction = 1;

 private:
  Pool& pool_for(size_t size, const Stream& stream);
  Block* cached(Pool& pool, size_t size, Stream& stream);
  Block* fresh(Pool& pool, size_t size, Stream& stream);
  Block* expand(Pool& pool, size_t size, Stream& stream);
  Block* map(Block* block, size_t size);
  Block* take(Block* block, size_t requested, size_t size);
  void poison(Block* block);
  void free_now(Block* block);
  size_t merge(Block* block, Block* neighbour);
  void process_uses(bool wait);
  void release_cached();
  bool release_cached(Pool& pool);
  void unmap(Block* block);
  bool within_limit(size_t bytes) const;

  int device_;
  Pool small_{true};
  Pool large_{false};
  std::map<uint64_t, GraphPool> graphs_;
  std::unordered_map<uintptr_t, Block*> allocated_;
  std::map<uintptr_t, size_t> segments_; // address spaces of expandable ones too
  std::deque<std::pair<RecordPtr, Block*>> uses_;
};

} // namespace emulated
