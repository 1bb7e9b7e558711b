#include "detector.h"

#include <sstream>
#include <thread>

namespace emulated {

namespace {

bool ordered(const Clock& clock, Actor self, Actor other, uint32_t time) {
  // What two host threads do to each other is no matter of the device.
  return self == other || (self >= kFirstHost && other >= kFirstHost) || clock.of(other) >= time;
}

std::string described(const OriginPtr& origin) {
  return origin->name + " on " + origin->actor + (origin->stack.empty() ? "" : " (" + origin->stack + ")");
}

} // namespace

void Poison::cancel() {
  int expected = kWaiting;
  if (!state.compare_exchange_strong(expected, kOver))
    while (state.load() != kOver)
      std::this_thread::yield();
}

// Make `at` a boundary between cells.
void Detector::split(uintptr_t at) {
  auto next = cells_.upper_bound(at);
  if (next == cells_.begin())
    return;
  auto cell = std::prev(next);
  if (cell->first == at || cell->second.end <= at)
    return;
  Cell right = cell->second;
  cell->second.end = at;
  cells_.emplace_hint(next, at, std::move(right));
}

void Detector::access(Actor actor, const Clock& clock, const Range& range, const OriginPtr& origin) {
  if (range.begin >= range.end)
    return;
  split(range.begin);
  split(range.end);
  bool reported = false;
  auto conflict = [&](const char* what, uintptr_t begin, uintptr_t end, const Access& before) {
    if (!reported)
      race(what, begin, end, origin, before.origin);
    reported = true;
  };
  const Access now{actor, clock.of(actor), origin, ++moment};
  auto cell = cells_.lower_bound(range.begin);
  uintptr_t at = range.begin;
  while (cell != cells_.end() && cell->first < range.end) {
    Cell& old = cell->second;
    if (old.poison && (old.poison->time == 0 || clock.of(old.poison->actor) < old.poison->time)) {
      old.poison->cancel();
      old.poison.reset();
    }
    if (old.write.origin && !ordered(clock, actor, old.write.actor, old.write.time))
      conflict(range.write ? "write after write" : "read after write", cell->first, old.end, old.write);
    if (range.write) {
      for (const Access& read : old.reads)
        if (!ordered(clock, actor, read.actor, read.time))
          conflict("write after read", cell->first, old.end, read);
      cell = cells_.erase(cell);
      continue;
    }
    // A read that this one comes after need not be kept: what comes after this one comes after both.
    std::erase_if(old.reads, [&](const Access& read) {
      return read.actor == actor || (read.actor < kFirstHost && clock.of(read.actor) >= read.time);
    });
    old.reads.push_back(now);
    if (at < cell->first)
      cells_.emplace_hint(cell, at, Cell{cell->first, {}, {now}, nullptr});
    at = old.end;
    ++cell;
  }
  if (range.write)
    cells_.emplace_hint(cell, range.begin, Cell{range.end, now, {}, nullptr});
  else if (at < range.end)
    cells_.emplace_hint(cell, at, Cell{range.end, {}, {now}, nullptr});
}

void Detector::reuse(
    Actor actor, const Clock& clock, const Clock& known, const Range& range, const OriginPtr& freed,
    uint64_t freed_at) {
  bool reported = false;
  auto check = [&](uintptr_t begin, uintptr_t end, Access& before) {
    if (!before.origin || before.moment > freed_at || ordered(clock, actor, before.actor, before.time))
      return;
    if (known.of(before.actor) < before.time && !reported) {
      race("freed while in use", begin, end, freed, before.origin);
      reported = true;
    }
    before.origin.reset(); // the host knew of its end, or it is reported: the next owner has nothing to do with it
  };
  for (auto cell = cells_.lower_bound(range.begin); cell != cells_.end() && cell->first < range.end; ++cell) {
    check(cell->first, cell->second.end, cell->second.write);
    for (Access& read : cell->second.reads)
      check(cell->first, cell->second.end, read);
    std::erase_if(cell->second.reads, [](const Access& read) { return !read.origin; });
  }
}

std::string Detector::under_way(const Clock& clock, uintptr_t begin, uintptr_t end) {
  split(begin);
  for (auto cell = cells_.lower_bound(begin); cell != cells_.end() && cell->first < end; ++cell) {
    const auto running = [&](const Access& access) {
      return access.origin && access.actor < kFirstHost && clock.of(access.actor) < access.time;
    };
    if (running(cell->second.write))
      return described(cell->second.write.origin);
    for (const Access& read : cell->second.reads)
      if (running(read))
        return described(read.origin);
  }
  return "";
}

void Detector::poisoned(uintptr_t begin, uintptr_t end, const std::shared_ptr<Poison>& poison) {
  split(begin);
  split(end);
  auto cell = cells_.lower_bound(begin);
  for (uintptr_t at = begin; at < end;) {
    if (cell == cells_.end() || cell->first >= end) {
      cells_.emplace_hint(cell, at, Cell{end, {}, {}, poison});
      return;
    }
    if (at < cell->first)
      cells_.emplace_hint(cell, at, Cell{cell->first, {}, {}, poison});
    if (cell->second.poison)
      cell->second.poison->cancel(); // freed again before anyone used it: who does use it cancels the later one only
    cell->second.poison = poison;
    at = cell->second.end;
    ++cell;
  }
}

void Detector::forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
}

void Detector::clear() {
  cells_.clear();
  reports.clear();
  seen_.clear();
}

void Detector::report(std::string text) {
  reports.push_back(std::move(text));
}

void Detector::race(
    const char* what, uintptr_t begin, uintptr_t end, const OriginPtr& now, const OriginPtr& before) {
  if (!seen_.emplace(now, before).second)
    return; // an operator may both read and write
  std::ostringstream text;
  text << what << ": " << described(now) << " is not ordered after " << described(before) << ", both at 0x" << std::hex
       << begin << " to 0x" << end;
  report(text.str());
}

} // namespace emulated
