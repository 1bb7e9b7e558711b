// Vector clocks, and what they order: streams and host threads ("actors").
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emulated {

constexpr int kDevices = 2;
constexpr int kPool = 32;                          // streams of one priority, handed out in turn as torch.cuda.Stream does
constexpr int kGraphStreams = 32;                  // on these the side branches of replayed graphs run
constexpr int kStreams = 1 + 2 * kPool + kGraphStreams; // the default stream, two priorities, graphs

// Number of an actor: device * kStreams + stream, or from kFirstHost on a host thread.
using Actor = uint32_t;
constexpr Actor kFirstHost = kDevices * kStreams;

// For each actor the number of its last action that is known to have ended before; missing entries are 0.
struct Clock {
  std::vector<uint32_t> times;

  uint32_t of(Actor actor) const {
    return actor < times.size() ? times[actor] : 0;
  }
  void advance(Actor actor) {
    if (actor >= times.size())
      times.resize(actor + 1);
    ++times[actor];
  }
  void join(const Clock& other) {
    if (other.times.size() > times.size())
      times.resize(other.times.size());
    for (size_t i = 0; i < other.times.size(); ++i)
      times[i] = std::max(times[i], other.times[i]);
  }
};

// A range of memory that a kernel, a copy or the host reads or writes.
struct Range {
  uintptr_t begin;
  uintptr_t end;
  bool write;
};

// What a report says about an access.
struct Origin {
  std::string name;  // "aten::add.out", "copy to the device"
  std::string actor; // "stream 3 of device 0", "host"
  std::string stack; // the innermost Python frames, "" if not known
};
using OriginPtr = std::shared_ptr<const Origin>;

// The innermost Python frames of this thread outside of PyTorch. Waits for the GIL: never called with a lock held.
std::string python_stack();
void set_stacks(bool on);

} // namespace emulated
