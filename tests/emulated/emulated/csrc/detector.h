// The race detector: a shadow of device memory and registered host memory, checked with vector clocks when work is given.
#pragma once

#include <atomic>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "clocks.h"

namespace emulated {

// The garbage that a stream writes into a freed block when it goes on: until then it may still be told to wait for
// others that use the block. It must not hit the next owner of the block, which may rightly use it on a stream that
// does not wait for this write: such an access cancels it.
struct Poison {
  enum State { kWaiting, kRunning, kOver };
  std::atomic<int> state{kWaiting};
  Actor actor = 0;
  uint32_t time = 0; // when it was given; 0: not yet

  bool begin() { // by the worker
    int expected = kWaiting;
    return state.compare_exchange_strong(expected, kRunning);
  }
  void end() {
    state.store(kOver);
  }
  void cancel(); // by the host; waits if it is being written
};

// All functions are called with the global lock held (streams.h).
class Detector {
 public:
  // Compare an access with those before it. `clock` is what the actor knows, its own time included.
  void access(Actor actor, const Clock& clock, const Range& range, const OriginPtr& origin);

  // Check that all accesses to a freed block are over when its owner stream goes on. `known` is what the host knew
  // when it freed the block.
  // Accesses since then, `moment`, are those of its next owner.
  void reuse(
      Actor actor, const Clock& clock, const Clock& known, const Range& range, const OriginPtr& freed, uint64_t moment);

  // Whether a stream's access in the range is not known to have ended; returns its description, or "".
  std::string under_way(const Clock& clock, uintptr_t begin, uintptr_t end);

  void poisoned(uintptr_t begin, uintptr_t end, const std::shared_ptr<Poison>& poison);
  void forget(uintptr_t begin, uintptr_t end);
  void clear();
  void report(std::string text);
  std::vector<std::string> reports;
  uint64_t moment = 0; // number of accesses until now

 private:
  struct Access {
    Actor actor;
    uint32_t time;
    OriginPtr origin;    // null: no access
    uint64_t moment = 0; // by the count of accesses
  };
  struct Cell {
    uintptr_t end;
    Access write;
    std::vector<Access> reads;
    std::shared_ptr<Poison> poison;
  };
  using Cells = std::map<uintptr_t, Cell>;

  void split(uintptr_t at);
  void race(const char* what, uintptr_t begin, uintptr_t end, const OriginPtr& now, const OriginPtr& before);
  Cells cells_;
  std::set<std::pair<OriginPtr, OriginPtr>> seen_; // pairs that were reported
};

} // namespace emulated
