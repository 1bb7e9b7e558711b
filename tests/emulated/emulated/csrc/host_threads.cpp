// The clocks of host threads.
//
// Unless locks are watched, nothing tells in what order threads act on each other, and one clock stands for all of them.
// While they are watched each thread has its own, which Python's locks join. Threads of autograd stand between: whoever
// calls backward waits for them, so they know what all threads know, and all threads know what they do.
#include <list>
#include <unordered_map>

#include "streams.h"

namespace emulated {

bool in_backward(); // autograd.cpp

namespace {

struct Host {
  Actor actor = kFirstHost;
  Clock clock;
  bool autograd = false;
};

struct State {
  bool watched = false;
  uint64_t era = 1; // of watching; a thread of an earlier one is seen anew
  Actor next = kFirstHost + 1;
  Host shared;
  std::list<Host> hosts; // one a thread while watched
  std::unordered_map<uintptr_t, Clock> locks;
};

State& state() {
  static State* all = [] {
    auto* made = new State;
    made->shared.clock.advance(kFirstHost);
    return made;
  }();
  return *all;
}

thread_local Host* mine = nullptr;
thread_local uint64_t seen_in = 0;

Host& host() {
  State& all = state();
  if (!all.watched)
    return all.shared;
  if (seen_in != all.era) {
    seen_in = all.era;
    mine = &all.hosts.emplace_back();
    mine->autograd = in_backward();
    mine->actor = all.next++;
    mine->clock = all.shared.clock;
    mine->clock.advance(mine->actor);
  }
  if (mine->autograd)
    for (const Host& other : all.hosts)
      mine->clock.join(other.clock);
  return *mine;
}

} // namespace

Clock& host_clock() {
  return host().clock;
}

Actor host_actor() {
  return host().actor;
}

void host_learns(const Clock& clock) {
  host().clock.join(clock);
}

void host_acted() {
  Host& self = host();
  self.clock.advance(self.actor);
  if (self.autograd)
    for (Host& other : state().hosts)
      other.clock.join(self.clock);
}

std::string host_name() {
  const Host& self = host();
  return self.actor == kFirstHost ? "the host" : "host thread " + std::to_string(self.actor - kFirstHost);
}

void watch_threads(bool on) {
  Giving lock(giving());
  State& all = state();
  for (const Host& other : all.hosts)
    all.shared.clock.join(other.clock);
  all.hosts.clear();
  all.locks.clear();
  all.next = kFirstHost + 1;
  all.watched = on;
  ++all.era;
}

void host_releases(uintptr_t address) {
  Giving lock(giving());
  if (!state().watched)
    return;
  state().locks[address].join(host_clock());
  host_acted();
}

void host_acquires(uintptr_t address) {
  Giving lock(giving());
  if (!state().watched)
    return;
  const auto found = state().locks.find(address);
  if (found != state().locks.end())
    host_learns(found->second);
}

void host_forgets_lock(uintptr_t address) {
  Giving lock(giving());
  state().locks.erase(address);
}

void clear_clocks() {
  Giving lock(giving());
  for (int device = 0; device < kDevices; ++device)
    for (int id = 0; id < kStreams; ++id) {
      Stream& stream = stream_at(device, id);
      stream.freed.clear();
      host_learns(stream.clock); // everything has ended: every thread may know
      if (state().watched)
        for (Host& other : state().hosts)
          other.clock.join(stream.clock);
    }
  detector().clear();
}

} // namespace emulated
