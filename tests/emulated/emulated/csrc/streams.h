// Streams, events and the order in which work is given: the heart of the emulated accelerator.
//
// Locks: `giving()` guards everything that the host does (clocks, detector, allocator, registry); `Queues::mutex` guards
// the queues and is taken inside of it. Workers take the second only, and never the GIL, so waiting for them with the
// first held is safe.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "clocks.h"
#include "detector.h"

namespace emulated {

constexpr auto kType = c10::DeviceType::PrivateUse1;

std::recursive_mutex& giving();
using Giving = std::lock_guard<std::recursive_mutex>;

enum class Kind { Kernel, Copy, Record, Wait };

// Seed and offset of a generator, of which random kernels of a replayed graph draw.
struct Draws {
  uint64_t seed;
  uint64_t offset;
};
// Executed by a stream's worker, several times in a graph; the argument is null outside of graphs.
using Work = std::function<void(const Draws*)>;

struct Stream;
struct Capture;

// One record of an event.
struct Record {
  Stream* stream = nullptr;
  uint64_t position = 0;
  Clock clock;
  std::atomic<int64_t> ns{0}; // when the stream came there
  Capture* capture = nullptr; // the capture that it is a node of
  size_t node = 0;
};
using RecordPtr = std::shared_ptr<Record>;

struct Event {
  RecordPtr record;
};

struct Task {
  Kind kind;
  Work work;
  RecordPtr record; // that this task makes or waits for
  std::string name = {};
};

struct Freed {
  Range range;
  Clock known;
  OriginPtr origin;
  std::shared_ptr<Poison> poison;
  uint64_t moment; // of the detector, when it was freed
};

struct Stream {
  int device = 0;
  int id = 0;
  Actor actor = 0;
  // guarded by giving()
  Clock clock;
  std::vector<Freed> freed; // blocks of this stream, to be checked when it goes on
  Capture* capture = nullptr;
  // guarded by Queues::mutex
  std::deque<Task> queue;
  uint64_t given = 0;
  uint64_t done = 0;
  uint64_t demanded = 0; // the host waits for everything up to here
  bool started = false;
  std::condition_variable wake;
  std::condition_variable finished;
  uint64_t delays = 0; // state of the generator of its delays

  std::string text() const {
    return "stream " + std::to_string(id) + " of device " + std::to_string(device);
  }
};

// ---- streams.cpp -----------------------------------------------------------------------------------------------------

Stream& stream_at(int device, int64_t id);
Stream& stream_of(const c10::Stream& stream);
c10::Stream torch_stream(const Stream& stream);
Stream& current_stream(int device);
Stream& exchange_stream(Stream& stream); // returns the one before
Stream& next_stream(int device, int priority);
int current_device();
void set_current_device(int device); // raises RuntimeError

// Give work to a stream: check its accesses, then queue it. Raises AcceleratorError after a fault.
void submit(Stream& stream, Kind kind, const std::string& name, const std::vector<Range>& ranges, Work work);
// The same for work of the emulator itself, which is not checked and cannot fail; returns its position.
uint64_t enqueue(Stream& stream, Task task);

RecordPtr record(Stream& stream);
void block(Stream& stream, const RecordPtr& record);
// Asking makes a stream that is held back go on, unless `demanding` is false.
bool query(const RecordPtr& record, bool demanding = true);
bool query(Stream& stream);
void synchronize(const RecordPtr& record);
void synchronize(Stream& stream);
void synchronize_device(int device);
// The same for the emulator's own purposes: no error, no effect on clocks.
void drain(int device);
uint64_t pending(int device);

void set_schedule(const std::string& kind, uint64_t seed); // raises ValueError
std::vector<int> streams_used(int device);

// ---- errors ----------------------------------------------------------------------------------------------------------

void fail(const std::string& message); // sticky: everything after it raises AcceleratorError
void check_device();                   // raise it
void clear_failure();
void fail_kernel(uint64_t number); // of those given from now on; 0: none

// ---- host threads (host_threads.cpp) -----------------------------------------------------------------------------------

Clock& host_clock(); // of the calling thread
Actor host_actor();
void host_learns(const Clock& clock);
void host_acted(); // what follows is later than what was given until now
std::string host_name();
void watch_threads(bool on);
void host_releases(uintptr_t lock); // an edge to the next host_acquires of the same lock
void host_acquires(uintptr_t lock);
void host_forgets_lock(uintptr_t lock);

Detector& detector();
void clear_clocks();

} // namespace emulated
