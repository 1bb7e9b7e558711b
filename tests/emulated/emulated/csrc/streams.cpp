#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

#include "blocks.h"
#include "graph.h"

namespace emulated {

namespace {

using Time = std::chrono::steady_clock;
constexpr uint64_t kLongestQueue = 1 << 16;

enum class Schedule { Eager, Random, LateCopies, LateCompute };

struct Queues {
  std::mutex mutex;
  std::atomic<Schedule> schedule{Schedule::Eager};
  std::array<std::array<Stream, kStreams>, kDevices> streams;
  std::array<std::array<int, 2>, kDevices> next{}; // in the pools, by priority

  std::mutex failure_mutex;
  std::string failure;
  std::atomic<bool> failed{false};
  uint64_t until_failure = 0; // kernels; 0: none fails

  Queues() {
    for (int device = 0; device < kDevices; ++device)
      for (int id = 0; id < kStreams; ++id) {
        Stream& stream = streams[device][id];
        stream.device = device;
        stream.id = id;
        stream.actor = device * kStreams + id;
      }
  }
};

Queues& queues() {
  static auto* all = new Queues; // never destroyed: workers outlive static objects
  return *all;
}

thread_local std::array<int, kDevices> currents{};
thread_local int device_of_thread = 0;

// Mark everything up to `position`, and what it waits for in other streams, as waited for. The mutex is held.
void demand(Stream& stream, uint64_t position) {
  if (stream.demanded >= position)
    return;
  stream.demanded = position;
  stream.wake.notify_all();
  const uint64_t end = std::min(position - std::min(position, stream.done), uint64_t(stream.queue.size()));
  for (uint64_t i = 0; i < end; ++i) {
    const Task& task = stream.queue[i];
    if (task.kind == Kind::Wait)
      demand(*task.record->stream, task.record->position);
  }
}

uint64_t next_random(uint64_t& state) { // splitmix64
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

bool held_back(Kind kind) {
  const Schedule schedule = queues().schedule;
  return (schedule == Schedule::LateCopies && kind == Kind::Copy) ||
      (schedule == Schedule::LateCompute && kind == Kind::Kernel);
}

void execute(Task& task) {
  if (task.record && task.kind == Kind::Record)
    task.record->ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Time::now().time_since_epoch()).count();
  if (!task.work || queues().failed)
    return;
  try {
    task.work(nullptr);
  } catch (const c10::Error& error) {
    fail(task.name + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(task.name + ": " + error.what());
  }
}

void run(Stream& stream) {
  const at::AutoDispatchBelowADInplaceOrView guard; // work may write tensors that were made in inference mode
  Queues& all = queues();
  std::unique_lock lock(all.mutex);
  for (;;) {
    stream.wake.wait(lock, [&] { return !stream.queue.empty(); });
    Task& task = stream.queue.front();
    const uint64_t position = stream.done + 1;
    if (task.kind == Kind::Wait) {
      Stream& other = *task.record->stream;
      other.finished.wait(lock, [&] { return other.done >= task.record->position; });
    } else if (held_back(task.kind)) {
      stream.wake.wait(lock, [&] { return stream.demanded >= position; }); // asking for it demands it, too
    } else if (all.schedule == Schedule::Random && task.kind != Kind::Record) {
      const uint64_t random = next_random(stream.delays);
      if (random % 4 == 0) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds((random >> 8) % 300));
        lock.lock();
      }
    }
    lock.unlock();
    execute(task); // only this thread takes tasks away, and a deque does not move them
    task.work = nullptr;
    lock.lock();
    stream.queue.pop_front();
    stream.done = position;
    stream.finished.notify_all();
  }
}

void wait_for(Stream& stream, uint64_t position) {
  std::unique_lock lock(queues().mutex);
  demand(stream, position);
  stream.finished.wait(lock, [&] { return stream.done >= position; });
}

bool ended(Stream& stream, uint64_t position, bool demanding = true) {
  std::lock_guard lock(queues().mutex);
  if (demanding)
    demand(stream, position);
  return stream.done >= position;
}

} // namespace

std::recursive_mutex& giving() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

Detector& detector() {
  static auto* made = new Detector;
  return *made;
}

// ---- which stream ----------------------------------------------------------------------------------------------------

Stream& stream_at(int device, int64_t id) {
  TORCH_CHECK(device >= 0 && device < kDevices && id >= 0 && id < kStreams, "emulated:", device, " has no stream ", id);
  return queues().streams[device][id];
}

Stream& stream_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kType, stream, " is no stream of an emulated device");
  return stream_at(stream.device_index(), stream.id());
}

c10::Stream torch_stream(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(stream.device)), stream.id);
}

Stream& current_stream(int device) {
  if (device < 0)
    device = device_of_thread;
  return stream_at(device, currents[device]);
}

Stream& exchange_stream(Stream& stream) {
  Stream& before = current_stream(stream.device);
  currents[stream.device] = stream.id;
  return before;
}

Stream& next_stream(int device, int priority) {
  Giving lock(giving());
  if (device < 0)
    device = device_of_thread;
  const int pool = priority < 0 ? 1 : 0;
  int& next = queues().next[device][pool];
  Stream& stream = stream_at(device, 1 + pool * kPool + next);
  next = (next + 1) % kPool;
  return stream;
}

int current_device() {
  return device_of_thread;
}

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "there is no device emulated:", device);
  device_of_thread = device;
}

// ---- giving work -----------------------------------------------------------------------------------------------------

uint64_t enqueue(Stream& stream, Task task) {
  Queues& all = queues();
  std::unique_lock lock(all.mutex);
  if (!stream.started) {
    stream.started = true;
    std::thread(run, std::ref(stream)).detach();
  }
  if (stream.given - stream.done > kLongestQueue) {
    demand(stream, stream.given);
    stream.finished.wait(lock, [&] { return stream.given - stream.done <= kLongestQueue; });
  }
  stream.queue.push_back(std::move(task));
  stream.wake.notify_all();
  return ++stream.given;
}

namespace {

// The stream goes on: blocks freed before may now be others'.
void settle(Stream& stream) {
  for (const Freed& freed : std::exchange(stream.freed, {})) {
    detector().reuse(stream.actor, stream.clock, freed.known, freed.range, freed.origin, freed.moment);
    freed.poison->time = stream.clock.of(stream.actor);
    enqueue(stream, {Kind::Kernel, [poison = freed.poison, range = freed.range](const Draws*) {
                       if (!poison->begin())
                         return;
                       std::memset(reinterpret_cast<void*>(range.begin), kGarbage, range.end - range.begin);
                       poison->end();
                     }, nullptr});
  }
}

} // namespace

void submit(Stream& stream, Kind kind, const std::string& name, const std::vector<Range>& ranges, Work work) {
  const std::string stack = python_stack();
  check_device();
  Giving lock(giving());
  if (stream.capture) {
    stream.capture->add(stream, kind, name, ranges, std::move(work));
    return;
  }
  uint64_t& until = queues().until_failure;
  if (until != 0 && --until == 0)
    work = [name](const Draws*) { fail("injected failure of " + name); };
  stream.clock.join(host_clock());
  stream.clock.advance(stream.actor);
  settle(stream);
  const auto origin = std::make_shared<const Origin>(Origin{name, stream.text(), stack});
  for (const Range& range : ranges)
    detector().access(stream.actor, stream.clock, range, origin);
  host_acted();
  enqueue(stream, {kind, std::move(work), nullptr, name});
}

RecordPtr record(Stream& stream) {
  check_device();
  Giving lock(giving());
  auto made = std::make_shared<Record>();
  made->stream = &stream;
  if (stream.capture) {
    stream.capture->record(stream, made);
    return made;
  }
  stream.clock.join(host_clock());
  made->clock = stream.clock;
  host_acted();
  made->position = enqueue(stream, {Kind::Record, nullptr, made});
  return made;
}

void block(Stream& stream, const RecordPtr& awaited) {
  if (!awaited)
    return;
  check_device();
  Giving lock(giving());
  if (stream.capture || awaited->capture) {
    Capture::wait(stream, awaited);
    return;
  }
  stream.clock.join(host_clock());
  stream.clock.join(awaited->clock);
  host_acted();
  if (awaited->stream != &stream) // its own work is over by then anyway
    enqueue(stream, {Kind::Wait, nullptr, awaited});
}

// ---- waiting and asking ----------------------------------------------------------------------------------------------

bool query(const RecordPtr& asked, bool demanding) {
  if (!asked)
    return true;
  check_device();
  Capture::forbid(asked->capture, "asking for an event");
  if (!ended(*asked->stream, asked->position, demanding))
    return false;
  check_device();
  Giving lock(giving());
  host_learns(asked->clock);
  return true;
}

bool query(Stream& stream) {
  check_device();
  Capture::forbid(stream.capture, "asking a stream");
  Clock clock;
  uint64_t position;
  {
    Giving lock(giving());
    clock = stream.clock;
    std::lock_guard queue(queues().mutex);
    position = stream.given;
  }
  if (!ended(stream, position))
    return false;
  check_device();
  Giving lock(giving());
  host_learns(clock);
  return true;
}

void synchronize(const RecordPtr& awaited) {
  if (!awaited)
    return;
  Capture::forbid(awaited->capture, "waiting for an event");
  wait_for(*awaited->stream, awaited->position);
  check_device();
  Giving lock(giving());
  host_learns(awaited->clock);
}

void synchronize(Stream& stream) {
  Capture::forbid(stream.capture, "waiting for a stream");
  Clock clock;
  uint64_t position;
  {
    Giving lock(giving());
    clock = stream.clock;
    std::lock_guard queue(queues().mutex);
    position = stream.given;
  }
  wait_for(stream, position);
  check_device();
  Giving lock(giving());
  host_learns(clock);
}

void synchronize_device(int device) {
  for (int id = 0; id < kStreams; ++id)
    synchronize(stream_at(device, id));
}

void drain(int device) {
  Queues& all = queues();
  std::unique_lock lock(all.mutex);
  for (Stream& stream : all.streams[device])
    demand(stream, stream.given);
  for (Stream& stream : all.streams[device]) {
    const uint64_t position = stream.given;
    stream.finished.wait(lock, [&] { return stream.done >= position; });
  }
}

uint64_t pending(int device) {
  std::lock_guard lock(queues().mutex);
  uint64_t count = 0;
  for (const Stream& stream : queues().streams[device])
    count += std::count_if(stream.queue.begin(), stream.queue.end(), [](const Task& task) {
      return task.kind == Kind::Kernel || task.kind == Kind::Copy;
    });
  return count;
}

void set_schedule(const std::string& kind, uint64_t seed) {
  static const std::array<std::pair<const char*, Schedule>, 4> kinds{{
      {"eager", Schedule::Eager},
      {"random", Schedule::Random},
      {"late_copies", Schedule::LateCopies},
      {"late_compute", Schedule::LateCompute},
  }};
  const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& known) { return kind == known.first; });
  TORCH_CHECK_VALUE(found != kinds.end(), "a schedule is eager, random, late_copies or late_compute, not ", kind);
  for (int device = 0; device < kDevices; ++device)
    drain(device);
  Queues& all = queues();
  std::lock_guard lock(all.mutex);
  all.schedule = found->second;
  for (auto& streams : all.streams)
    for (Stream& stream : streams)
      stream.delays = seed * 1000003 + stream.actor;
}

std::vector<int> streams_used(int device) {
  std::lock_guard lock(queues().mutex);
  std::vector<int> ids;
  for (const Stream& stream : queues().streams[device])
    if (stream.given > 0)
      ids.push_back(stream.id);
  return ids;
}

// ---- errors ----------------------------------------------------------------------------------------------------------

void fail(const std::string& message) {
  std::lock_guard lock(queues().failure_mutex);
  if (!queues().failed)
    queues().failure = message;
  queues().failed = true;
}

void check_device() {
  if (!queues().failed)
    return;
  std::string message;
  {
    std::lock_guard lock(queues().failure_mutex);
    message = "emulated device error: " + queues().failure;
  }
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 700, message); // CUDA's number of an illegal address
}

void clear_failure() {
  std::lock_guard lock(queues().failure_mutex);
  queues().failed = false;
  queues().failure.clear();
}

void fail_kernel(uint64_t number) {
  Giving lock(giving());
  queues().until_failure = number;
}

} // namespace emulated
