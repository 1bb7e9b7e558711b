#include "device_memory.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "graph.h"

namespace emulated {

namespace {

using c10::CachingAllocator::AcceleratorAllocatorConfig;

size_t segment_size(size_t size) {
  if (size <= kSmallSize)
    return kSmallBuffer;
  return size < kMinLargeAllocation ? large_buffer<AcceleratorAllocatorConfig>(0) : (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

} // namespace

void change(StatArray& stat, const Pool& pool, int64_t amount) {
  for (const size_t type : {size_t(0), pool.small ? size_t(1) : size_t(2)})
    amount >= 0 ? stat[type].increase(amount) : stat[type].decrease(-amount);
}

void trace(const char* action, const Block& block, size_t bytes); // allocator.cpp

Pool& DeviceMemory::pool_for(size_t size, const Stream& stream) {
  if (!stream.capture)
    return size <= kSmallSize ? small_ : large_;
  GraphPool& graph = graphs_.at(stream.capture->pool);
  return size <= kSmallSize ? graph.small : graph.large;
}

bool DeviceMemory::within_limit(size_t bytes) const {
  const double allowed = std::min(1.0, fraction) * static_cast<double>(total);
  return static_cast<double>(stats.reserved_bytes[0].current + bytes) <= allowed;
}

Block* DeviceMemory::allocate(size_t bytes, Stream& stream) {
  process_uses(false);
  const size_t size = std::max(kMinBlock, (bytes + kMinBlock - 1) / kMinBlock * kMinBlock);
  Pool& pool = pool_for(size, stream);
  Block* block = bytes > size ? nullptr : cached(pool, size, stream); // rounding has overflowed
  if (!block && bytes <= size && !(block = fresh(pool, size, stream))) {
    ++stats.num_alloc_retries;
    release_cached();
    block = fresh(pool, size, stream);
  }
  if (!block) {
    ++stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "emulated device ", device_, " out of memory. Tried to allocate ", bytes, " bytes; ",
        stats.allocated_bytes[0].current, " bytes are allocated and ", stats.reserved_bytes[0].current, " reserved of ",
        total, " (limit ", fraction, ").");
  }
  return take(block, bytes, size);
}

// The best fit of the stream's free blocks, or null.
Block* DeviceMemory::cached(Pool& pool, size_t size, Stream& stream) {
  Block key{&stream, size, 0, &pool};
  auto found = pool.blocks.lower_bound(&key);
  const auto end = pool.blocks.end();
  if (found == end || (*found)->stream != &stream)
    return nullptr;
  if ((*found)->expandable) {
    // A block that its segment can make larger counts as that large.
    const auto extent = [](const Block* block) {
      return block->size + (block->next && !block->next->mapped ? block->next->size : 0);
    };
    for (auto next = std::next(found); (*found)->expandable && next != end && (*next)->stream == &stream &&
         extent(*next) < extent(*found);
         ++next)
      found = next;
  }
  Block* block = *found;
  pool.blocks.erase(found);
  return block;
}

Block* DeviceMemory::fresh(Pool& pool, size_t size, Stream& stream) {
  if (AcceleratorAllocatorConfig::use_expandable_segments() && !pool.graph)
    return expand(pool, size, stream);
  const size_t bytes = segment_size(size);
  if (!within_limit(bytes))
    return nullptr;
  Block* block = new Block{&stream, bytes, map_segment(bytes), &pool};
  segments_[block->address] = bytes;
  change(stats.segment, pool, 1);
  change(stats.reserved_bytes, pool, bytes);
  ++stats.num_device_alloc;
  trace("segment_alloc", *block, bytes);
  return block;
}

// Split what is not needed off, and count the block as allocated.
Block* DeviceMemory::take(Block* block, size_t requested, size_t size) {
  Pool& pool = *block->pool;
  const size_t remaining = block->size - size;
  const bool was_split = block->is_split();
  const bool to_the_byte = pool.small || AcceleratorAllocatorConfig::use_expandable_segments();
  const bool split = to_the_byte ? remaining >= kMinBlock : remaining > kSmallSize;
  if (was_split && !block->expandable) {
    change(stats.inactive_split_bytes, pool, -static_cast<int64_t>(block->size));
    if (!split)
      change(stats.inactive_split, pool, -1);
  }
  if (split) {
    Block* rest = new Block{block->stream, remaining, block->address + size, &pool};
    rest->expandable = block->expandable;
    rest->previous = block;
    rest->next = block->next;
    if (rest->next)
      rest->next->previous = rest;
    block->next = rest;
    block->size = size;
    pool.blocks.insert(rest);
    if (!block->expandable) {
      change(stats.inactive_split_bytes, pool, remaining);
      if (!was_split)
        change(stats.inactive_split, pool, 1);
    }
  }
  block->allocated = true;
  block->requested = requested;
  allocated_[block->address] = block;
  change(stats.allocation, pool, 1);
  change(stats.allocated_bytes, pool, block->size);
  change(stats.active, pool, 1);
  change(stats.active_bytes, pool, block->size);
  change(stats.requested_bytes, pool, requested);
  trace("alloc", *block, requested);
  return block;
}

void DeviceMemory::use(Block* block, Stream& stream) {
  if (block->stream != &stream)
    block->uses.insert(&stream);
}

void DeviceMemory::free(Block* block, OriginPtr origin) {
  trace("free", *block, block->requested);
  allocated_.erase(block->address);
  block->allocated = false;
  block->freed_by = std::move(origin);
  block->known = host_clock();
  change(stats.allocation, *block->pool, -1);
  change(stats.allocated_bytes, *block->pool, -static_cast<int64_t>(block->size));
  for (Stream* stream : std::exchange(block->uses, {})) {
    auto record = std::make_shared<Record>();
    record->stream = stream;
    record->clock = stream->clock;
    record->position = enqueue(*stream, {Kind::Record, nullptr, record});
    ++block->events;
    uses_.emplace_back(std::move(record), block);
  }
  if (block->events == 0)
    free_now(block);
}

// Give back the blocks whose uses on other streams have ended.
void DeviceMemory::process_uses(bool wait) {
  for (size_t count = uses_.size(); count > 0; --count) {
    auto [record, block] = std::move(uses_.front());
    uses_.pop_front();
    if (wait)
      synchronize(record);
    else if (!query(record, false)) {
      uses_.emplace_back(std::move(record), block);
      continue;
    }
    block->known.join(record->clock);
    if (--block->events == 0)
      free_now(block);
  }
}

void DeviceMemory::free_now(Block* block) {
  Pool& pool = *block->pool;
  change(stats.active, pool, -1);
  change(stats.active_bytes, pool, -static_cast<int64_t>(block->size));
  change(stats.requested_bytes, pool, -static_cast<int64_t>(block->requested));
  block->requested = 0;
  poison(block);
  int64_t blocks = 0, bytes = 0;
  const auto count = [&](size_t merged) {
    if (merged > 0) {
      --blocks;
      bytes -= merged;
    }
  };
  count(merge(block, block->previous));
  count(merge(block, block->next));
  pool.blocks.insert(block);
  if (block->is_split()) {
    ++blocks;
    bytes += block->size;
  }
  if (!block->expandable) {
    change(stats.inactive_split, pool, blocks);
    change(stats.inactive_split_bytes, pool, bytes);
  }
}

// Let the stream check the block and write garbage into it when it goes on.
void DeviceMemory::poison(Block* block) {
  Stream& stream = *block->stream;
  if (stream.capture || block->pool->graph)
    return; // what a graph's kernels leave there is another replay's
  const Range range{block->address, block->address + block->size, true};
  auto poison = std::make_shared<Poison>();
  poison->actor = stream.actor;
  detector().poisoned(range.begin, range.end, poison);
  stream.freed.push_back({range, std::exchange(block->known, {}), std::exchange(block->freed_by, {}), poison,
                          detector().moment});
}

// Merge a free neighbour into the block; returns the neighbour's bytes, or 0.
size_t DeviceMemory::merge(Block* block, Block* neighbour) {
  if (!neighbour || !neighbour->is_free() || neighbour->mapped != block->mapped)
    return 0;
  if (neighbour == block->previous) {
    block->address = neighbour->address;
    block->previous = neighbour->previous;
    if (block->previous)
      block->previous->next = block;
  } else {
    block->next = neighbour->next;
    if (block->next)
      block->next->previous = block;
  }
  const size_t size = neighbour->size;
  block->size += size;
  if (neighbour->mapped)
    block->pool->blocks.erase(neighbour);
  else
    block->pool->unmapped.erase(neighbour);
  delete neighbour;
  return size;
}

Block* DeviceMemory::find(uintptr_t address) const {
  const auto found = allocated_.find(address);
  return found == allocated_.end() ? nullptr : found->second;
}

bool DeviceMemory::contains(uintptr_t address) const {
  const auto next = segments_.upper_bound(address);
  return next != segments_.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

std::vector<BlockAlive> DeviceMemory::alive() const {
  std::vector<BlockAlive> blocks;
  for (const auto& [address, block] : allocated_)
    blocks.emplace_back(address, block->requested, block->stream->id);
  std::sort(blocks.begin(), blocks.end());
  return blocks;
}

} // namespace emulated
