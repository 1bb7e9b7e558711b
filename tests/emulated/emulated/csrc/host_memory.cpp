#include "host_memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <map>
#include <sstream>
#include <unordered_map>

namespace emulated {

namespace {

struct Registered {
  uintptr_t end;
  bool by_allocator;
};

struct PinnedBlock {
  size_t size;
  std::map<Stream*, RecordPtr> uses;
};

struct HostMemory {
  std::map<uintptr_t, Registered> ranges;
  std::unordered_map<uintptr_t, PinnedBlock> blocks;
  std::multimap<size_t, uintptr_t> free;
  at::HostStats stats;
};

HostMemory& host_memory() {
  static auto* all = new HostMemory;
  return *all;
}

std::string text_of(uintptr_t address, size_t bytes) {
  std::ostringstream text;
  text << bytes << " bytes at 0x" << std::hex << address;
  return text.str();
}

// Errors of a finalizer are easily lost, so they are reports as well.
[[noreturn]] void refuse(const std::string& message) {
  detector().report(message);
  TORCH_CHECK(false, message);
}

// The registered range that overlaps [begin, end), or the end.
std::map<uintptr_t, Registered>::iterator overlapping(uintptr_t begin, uintptr_t end) {
  auto& ranges = host_memory().ranges;
  const auto next = ranges.lower_bound(end);
  if (next == ranges.begin() || std::prev(next)->second.end <= begin)
    return ranges.end();
  return std::prev(next);
}

void give_back_pinned(void* address);

// PyTorch's allocator of pinned memory: sizes are powers of two, a freed block waits for the streams that use it.
struct PinnedAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0)
      return {nullptr, nullptr, &give_back_pinned, at::DeviceType::CPU};
    Giving lock(giving());
    HostMemory& all = host_memory();
    const size_t size = std::bit_ceil(std::max<size_t>(bytes, 4096));
    for (auto [found, end] = all.free.equal_range(size); found != end; ++found) {
      PinnedBlock& block = all.blocks.at(found->second);
      std::erase_if(block.uses, [](const auto& use) { return query(use.second, false); });
      if (!block.uses.empty())
        continue;
      const uintptr_t address = found->second;
      all.free.erase(found);
      return data(address);
    }
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, size, " bytes of pinned host memory are not to be had: out of memory");
    const auto address = reinterpret_cast<uintptr_t>(memory);
    all.ranges[address] = {address + size, true};
    all.blocks[address].size = size;
    all.stats.allocated_bytes.increase(size);
    return data(address);
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &give_back_pinned;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    Giving lock(giving());
    if (!host_memory().blocks.count(reinterpret_cast<uintptr_t>(address)))
      return false;
    host_memory_used(reinterpret_cast<uintptr_t>(address), stream_of(stream));
    return true;
  }
  void empty_cache() override {
    Giving lock(giving());
    HostMemory& all = host_memory();
    for (auto found = all.free.begin(); found != all.free.end();) {
      const uintptr_t address = found->second;
      PinnedBlock& block = all.blocks.at(address);
      for (auto& [stream, use] : block.uses)
        synchronize(use);
      detector().forget(address, address + block.size);
      munmap(reinterpret_cast<void*>(address), block.size);
      all.stats.allocated_bytes.decrease(block.size);
      all.ranges.erase(address);
      all.blocks.erase(address);
      found = all.free.erase(found);
    }
  }
  at::HostStats get_stats() override {
    Giving lock(giving());
    return host_memory().stats;
  }
  void reset_accumulated_stats() override {
    Giving lock(giving());
    host_memory().stats.allocated_bytes.reset_accumulated();
    host_memory().stats.active_bytes.reset_accumulated();
  }
  void reset_peak_stats() override {
    Giving lock(giving());
    host_memory().stats.allocated_bytes.reset_peak();
    host_memory().stats.active_bytes.reset_peak();
  }

 private:
  static at::DataPtr data(uintptr_t address) {
    void* memory = reinterpret_cast<void*>(address);
    host_memory().stats.active_bytes.increase(host_memory().blocks.at(address).size);
    return {memory, memory, &give_back_pinned, at::DeviceType::CPU};
  }
};

void give_back_pinned(void* memory) {
  if (!memory)
    return;
  Giving lock(giving());
  const auto address = reinterpret_cast<uintptr_t>(memory);
  HostMemory& all = host_memory();
  const size_t size = all.blocks.at(address).size;
  all.stats.active_bytes.decrease(size);
  all.free.emplace(size, address);
}

} // namespace

bool is_mapped(uintptr_t address, size_t bytes) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t begin = address / page * page, end = (address + bytes + page - 1) / page * page;
  // Succeeds for mapped pages only, and changes nothing.
  return msync(reinterpret_cast<void*>(begin), end - begin, MS_ASYNC) == 0;
}

void host_register(uintptr_t address, size_t bytes) {
  Giving lock(giving());
  if (bytes == 0)
    refuse("registering no bytes");
  if (overlapping(address, address + bytes) != host_memory().ranges.end())
    refuse("registering memory that is registered: " + text_of(address, bytes));
  if (!is_mapped(address, bytes))
    refuse("registering memory that is not mapped: " + text_of(address, bytes));
  host_memory().ranges[address] = {address + bytes, false};
}

void host_unregister(uintptr_t address) {
  Giving lock(giving());
  HostMemory& all = host_memory();
  const auto found = all.ranges.find(address);
  if (found == all.ranges.end() || found->second.by_allocator)
    refuse("unregistering memory that is not registered: " + text_of(address, 0));
  const uintptr_t end = found->second.end;
  const size_t bytes = end - address;
  const std::string user = detector().under_way(host_clock(), address, end);
  const bool mapped = is_mapped(address, bytes);
  all.ranges.erase(found);
  detector().forget(address, end);
  if (!mapped)
    refuse("unregistering memory that is not mapped any more: " + text_of(address, bytes));
  if (!user.empty())
    refuse("unregistering memory in use by " + user + ": " + text_of(address, bytes));
}

bool is_registered(uintptr_t address, size_t bytes) {
  Giving lock(giving());
  const auto found = overlapping(address, address + std::max<size_t>(bytes, 1));
  return found != host_memory().ranges.end() && found->first <= address && address + bytes <= found->second.end;
}

size_t registered_bytes() {
  Giving lock(giving());
  size_t bytes = 0;
  for (const auto& [begin, range] : host_memory().ranges)
    if (!range.by_allocator)
      bytes += range.end - begin;
  return bytes;
}

at::HostAllocator* host_allocator() {
  static auto* made = new PinnedAllocator;
  return made;
}

void host_memory_used(uintptr_t address, Stream& stream) {
  Giving lock(giving());
  const auto range = overlapping(address, address + 1);
  if (range == host_memory().ranges.end() || !range->second.by_allocator || stream.capture)
    return;
  host_memory().blocks.at(range->first).uses[&stream] = record(stream);
}

void host_access(uintptr_t address, size_t bytes, bool write, const std::string& name) {
  if (bytes == 0)
    return;
  const std::string stack = python_stack();
  Giving lock(giving());
  if (!is_registered(address, bytes))
    return;
  const auto origin = std::make_shared<const Origin>(Origin{name, host_name(), stack});
  detector().access(host_actor(), host_clock(), {address, address + bytes, write}, origin);
}

} // namespace emulated
