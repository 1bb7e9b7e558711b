// Segments of a device's memory: those that expand, and giving segments back to the driver.
#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>

#include "device_memory.h"

namespace emulated {

void trace(const char* action, const Block& block, size_t bytes); // allocator.cpp

// A block of an expandable segment: a free one that its unmapped neighbour makes large enough, or one of unmapped memory.
Block* DeviceMemory::expand(Pool& pool, size_t size, Stream& stream) {
  Block* candidate = nullptr;
  for (Block* unmapped : pool.unmapped) {
    if (unmapped->stream != &stream)
      continue;
    Block* before = unmapped->previous && unmapped->previous->is_free() ? unmapped->previous : nullptr;
    if (unmapped->size + (before ? before->size : 0) >= size) {
      candidate = before ? before : unmapped;
      break;
    }
  }
  if (!candidate) {
    // Room for all of the device's memory, and an eighth more, as the driver has no use of addresses otherwise
    const size_t page = pool.small ? kSmallBuffer : large_buffer<c10::CachingAllocator::AcceleratorAllocatorConfig>(0);
    const size_t bytes = (total + total / 8 + page - 1) / page * page;
    auto* segment = new Expandable{reserve_addresses(bytes), page, bytes};
    segments_[segment->begin] = bytes;
    candidate = new Block{&stream, bytes, segment->begin, &pool};
    candidate->mapped = false;
    candidate->expandable = segment;
    pool.unmapped.insert(candidate);
  }
  if (!candidate->mapped && !(candidate = map(candidate, std::min(size, candidate->size))))
    return nullptr;
  while (candidate->size < size) {
    Block* added = map(candidate->next, std::min(size - candidate->size, candidate->next->size));
    if (!added)
      return nullptr;
    candidate = added;
  }
  pool.blocks.erase(candidate);
  return candidate;
}

// Map pages at the beginning of an unmapped block; returns the mapped block, merged with free ones beside it, or null.
Block* DeviceMemory::map(Block* block, size_t size) {
  Pool& pool = *block->pool;
  const size_t page = block->expandable->page;
  const size_t bytes = (size + page - 1) / page * page;
  if (!within_limit(bytes))
    return nullptr;
  pool.unmapped.erase(block);
  map_pages(block->address, bytes);
  block->mapped = true;
  if (bytes < block->size) {
    Block* rest = new Block{block->stream, block->size - bytes, block->address + bytes, &pool};
    rest->mapped = false;
    rest->expandable = block->expandable;
    rest->previous = block;
    rest->next = block->next;
    if (rest->next)
      rest->next->previous = rest;
    block->next = rest;
    block->size = bytes;
    pool.unmapped.insert(rest);
  }
  merge(block, block->previous);
  merge(block, block->next);
  pool.blocks.insert(block);
  change(stats.reserved_bytes, pool, bytes);
  ++stats.num_device_alloc;
  trace("segment_alloc", *block, bytes);
  return block;
}

void DeviceMemory::empty_cache() {
  release_cached();
}

// Give all segments that nothing is allocated in back to the driver, which waits for the device.
void DeviceMemory::release_cached() {
  process_uses(true);
  drain(device_);
  release_cached(large_);
  release_cached(small_);
  for (auto graph = graphs_.begin(); graph != graphs_.end();) {
    if (graph->second.users == 0) {
      const bool emptied = release_cached(graph->second.large) & release_cached(graph->second.small);
      if (emptied) {
        graph = graphs_.erase(graph);
        continue;
      }
    }
    ++graph;
  }
}

// Returns whether nothing of the pool is left.
bool DeviceMemory::release_cached(Pool& pool) {
  std::vector<Block*> free(pool.blocks.begin(), pool.blocks.end());
  for (Block* block : free) {
    if (block->expandable) {
      unmap(block);
    } else if (!block->is_split()) {
      pool.blocks.erase(block);
      segments_.erase(block->address);
      detector().forget(block->address, block->address + block->size);
      std::erase_if(block->stream->freed, [&](const Freed& freed) {
        return freed.range.begin >= block->address && freed.range.end <= block->address + block->size;
      });
      unmap_segment(block->address, block->size);
      change(stats.segment, pool, -1);
      change(stats.reserved_bytes, pool, -static_cast<int64_t>(block->size));
      ++stats.num_device_free;
      trace("segment_free", *block, block->size);
      delete block;
    }
  }
  return pool.blocks.empty();
}

// Unmap the whole pages of a free block of an expandable segment.
void DeviceMemory::unmap(Block* block) {
  Pool& pool = *block->pool;
  const Expandable& segment = *block->expandable;
  const size_t page = segment.page;
  const uintptr_t begin = segment.begin + (block->address - segment.begin + page - 1) / page * page;
  const uintptr_t end = segment.begin + (block->address + block->size - segment.begin) / page * page;
  if (begin >= end)
    return;
  pool.blocks.erase(block);
  const auto part = [&](uintptr_t from, uintptr_t to) {
    Block* made = new Block{block->stream, to - from, from, &pool};
    made->expandable = block->expandable;
    return made;
  };
  if (block->address < begin) { // what is left of it before
    Block* before = part(block->address, begin);
    before->previous = block->previous;
    if (before->previous)
      before->previous->next = before;
    before->next = block;
    block->previous = before;
    pool.blocks.insert(before);
  }
  if (end < block->address + block->size) { // and after
    Block* after = part(end, block->address + block->size);
    after->next = block->next;
    if (after->next)
      after->next->previous = after;
    after->previous = block;
    block->next = after;
    pool.blocks.insert(after);
  }
  block->address = begin;
  block->size = end - begin;
  block->mapped = false;
  detector().forget(begin, end);
  // Of a range that is unmapped in part, too: its garbage would come into the next owner's memory.
  std::erase_if(block->stream->freed, [&](const Freed& freed) {
    return freed.range.begin < end && freed.range.end > begin;
  });
  unmap_pages(begin, end - begin);
  change(stats.reserved_bytes, pool, -static_cast<int64_t>(end - begin));
  ++stats.num_device_free;
  trace("segment_free", *block, end - begin);
  merge(block, block->previous);
  merge(block, block->next);
  pool.unmapped.insert(block);
}

void DeviceMemory::retain(uint64_t pool) {
  GraphPool& graph = graphs_[pool];
  graph.small.graph = graph.large.graph = pool;
  ++graph.users;
}

void DeviceMemory::release(uint64_t pool) {
  const auto found = graphs_.find(pool);
  if (found != graphs_.end())
    --found->second.users;
}

} // namespace emulated
