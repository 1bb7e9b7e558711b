// Captured graphs: the work of capturing streams is kept instead of done, and given anew at each replay.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "streams.h"

namespace emulated {

struct Node {
  int stream; // 0: the one that the capture began on
  Kind kind;
  std::string name;
  std::vector<Range> ranges;
  Work work;
  size_t awaited = 0; // number of the node that made the record
};

struct Capture {
  Stream* origin = nullptr;
  uint64_t pool = 0; // of the allocator
  std::vector<Node> nodes;
  std::map<Stream*, int> streams; // that take part, by their number
  std::set<int> joined_after;     // numbers of streams with work that the origin has not waited for
  std::map<int, uint64_t> draws;  // offsets drawn of each device's default generator
  bool invalid = false;           // by something that may not be done during capture

  int number(Stream& stream);
  void add(Stream& stream, Kind kind, const std::string& name, const std::vector<Range>& ranges, Work work);
  void record(Stream& stream, const RecordPtr& record);
  // A wait of a stream for an event, one of which is being captured.
  static void wait(Stream& stream, const RecordPtr& record);
  // Raise RuntimeError if `capture` is not null: what synchronises may not be done.
  static void forbid(Capture* capture, const char* what);
};

} // namespace emulated
