#include "allocator.h"

#include <c10/util/Exception.h>

#include <cstring>

#include "device_memory.h"

namespace emulated {

namespace {

struct Memories {
  DeviceMemory devices[kDevices] = {DeviceMemory(0), DeviceMemory(1)};
  uint64_t until_failure = 0;
  bool traced = false;
  std::vector<TraceEntry> trace;
  uint64_t pools = 0;
};

Memories& memories() {
  static auto* all = new Memories;
  return *all;
}

DeviceMemory& memory_of(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "there is no device emulated:", device);
  return memories().devices[device];
}

Block* block_at(const void* address, int* device = nullptr) {
  for (int i = 0; i < kDevices; ++i)
    if (Block* block = memories().devices[i].find(reinterpret_cast<uintptr_t>(address))) {
      if (device)
        *device = i;
      return block;
    }
  return nullptr;
}

void give_back(void* address) {
  const std::string stack = python_stack();
  Giving lock(giving());
  int device = 0;
  Block* block = block_at(address, &device);
  TORCH_INTERNAL_ASSERT(block, "freed what was not allocated");
  const auto origin = std::make_shared<const Origin>(
      Origin{"free of " + std::to_string(block->requested) + " bytes", block->stream->text(), stack});
  memory_of(device).free(block, origin);
}

struct CachingAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device();
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(index));
    if (bytes == 0)
      return {nullptr, device};
    Giving lock(giving());
    uint64_t& until = memories().until_failure;
    if (until != 0 && --until == 0)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "emulated device ", index,
                       " out of memory. Tried to allocate ", bytes, " bytes (injected failure).");
    void* address = reinterpret_cast<void*>(memory_of(index).allocate(bytes, current_stream(index))->address);
    return {address, address, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    const auto from = reinterpret_cast<uintptr_t>(source), to = reinterpret_cast<uintptr_t>(target);
    submit(current_stream(-1), Kind::Kernel, "copy of a storage", {{from, from + bytes, false}, {to, to + bytes, true}},
           [=](const Draws*) { std::memcpy(target, source, bytes); });
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    check_device();
    Giving lock(giving());
    for (DeviceMemory& memory : memories().devices)
      memory.empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Giving lock(giving());
    int device = 0;
    if (Block* block = block_at(data.get_context(), &device))
      memory_of(device).use(block, stream_of(stream));
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Giving lock(giving());
    return memory_of(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Giving lock(giving());
    DeviceStats& stats = memory_of(device).stats;
    for_each(stats, [](auto& stat) { stat.reset_accumulated(); });
    stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Giving lock(giving());
    for_each(memory_of(device).stats, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Giving lock(giving());
    size_t used = memory_of(device).stats.reserved_bytes[0].current;
    return {memory_of(device).total - used, memory_of(device).total};
  }

 private:
  template <typename F>
  static void for_each(DeviceStats& stats, F change) {
    for (auto* array :
         {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
          &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes})
      for (auto& stat : *array)
        change(stat);
  }
};

} // namespace

void trace(const char* action, const Block& block, size_t bytes) {
  if (memories().traced)
    memories().trace.emplace_back(action, block.address, bytes, block.stream->id);
}

c10::DeviceAllocator* allocator() {
  static auto* made = new CachingAllocator;
  return made;
}

void set_memory_fraction(double fraction, int device) {
  TORCH_CHECK_VALUE(fraction >= 0 && fraction <= 1, "a fraction of memory is from 0 to 1, not ", fraction);
  Giving lock(giving());
  memory_of(device).fraction = fraction;
}

double memory_fraction(int device) {
  Giving lock(giving());
  return memory_of(device).fraction;
}

void set_memory(size_t total, int device) {
  Giving lock(giving());
  memory_of(device).total = total;
}

size_t total_memory(int device) {
  Giving lock(giving());
  return memory_of(device).total;
}

size_t reserved_memory(int device) {
  Giving lock(giving());
  return memory_of(device).stats.reserved_bytes[0].current;
}

void fail_allocation(uint64_t number) {
  Giving lock(giving());
  memories().until_failure = number;
}

int device_of_address(const void* address) {
  Giving lock(giving());
  for (int device = 0; device < kDevices; ++device)
    if (memories().devices[device].contains(reinterpret_cast<uintptr_t>(address)))
      return device;
  return -1;
}

std::vector<BlockAlive> blocks_alive(int device) {
  Giving lock(giving());
  return memory_of(device).alive();
}

void trace_allocations(bool on) {
  Giving lock(giving());
  memories().traced = on;
  memories().trace.clear();
}

std::vector<TraceEntry> allocation_trace() {
  Giving lock(giving());
  return memories().trace;
}

uint64_t retain_pool(uint64_t pool) {
  Giving lock(giving());
  if (pool == 0)
    pool = ++memories().pools;
  for (DeviceMemory& memory : memories().devices)
    memory.retain(pool);
  return pool;
}

void release_pool(uint64_t pool) {
  Giving lock(giving());
  for (DeviceMemory& memory : memories().devices)
    memory.release(pool);
}

} // namespace emulated
