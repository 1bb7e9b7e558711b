#include "graph.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define HAS_GRAPHS // since PyTorch 2.12
#endif
#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>

#include "allocator.h"
#include "generator.h"

namespace emulated {

int Capture::number(Stream& stream) {
  const auto [found, added] = streams.try_emplace(&stream, static_cast<int>(streams.size()));
  if (added) {
    TORCH_CHECK(streams.size() <= kGraphStreams, "a graph of more than ", kGraphStreams, " streams");
    stream.capture = this;
  }
  return found->second;
}

void Capture::add(Stream& stream, Kind kind, const std::string& name, const std::vector<Range>& ranges, Work work) {
  const int own = number(stream);
  nodes.push_back({own, kind, name, ranges, std::move(work)});
  if (own != 0)
    joined_after.insert(own);
}

void Capture::record(Stream& stream, const RecordPtr& record) {
  record->capture = this;
  record->node = nodes.size();
  nodes.push_back({number(stream), Kind::Record, "record", {}, nullptr});
}

void Capture::wait(Stream& stream, const RecordPtr& record) {
  Capture* capture = record->capture;
  if (!capture) {
    stream.capture->invalid = true;
    TORCH_CHECK(false, "a capturing stream waits for an event that was recorded outside of the capture");
  }
  TORCH_CHECK(!stream.capture || stream.capture == capture, "streams of two captures wait for each other");
  const int own = capture->number(stream);
  capture->nodes.push_back({own, Kind::Wait, "wait", {}, nullptr, record->node});
  capture->joined_after.erase(capture->nodes[record->node].stream);
  if (own != 0)
    capture->joined_after.insert(own);
}

void Capture::forbid(Capture* capture, const char* what) {
  if (!capture)
    return;
  capture->invalid = true;
  TORCH_CHECK(false, what, " is not permitted while its stream is capturing");
}

#ifdef HAS_GRAPHS
namespace {

struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs& arguments) : keep_(arguments.keep_graph) {}
  ~Graph() override {
    reset();
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    Giving lock(giving());
    Stream& stream = current_stream(-1);
    TORCH_CHECK(!capture_, "the graph has been captured already; call reset() first");
    TORCH_CHECK(!stream.capture, stream.text(), " is capturing already");
    TORCH_CHECK(stream.id != 0, "a graph must be captured on a stream other than the default one");
    capture_ = std::make_unique<Capture>();
    capture_->origin = &stream;
    capture_->pool = pool_ = retain_pool(pool.first != 0 ? pool.first : pool.second);
    capture_->number(stream);
    capturing_ = true;
  }

  void capture_end() override {
    Giving lock(giving());
    TORCH_CHECK(capturing_, "capture_end() without capture_begin()");
    TORCH_CHECK(&current_stream(capture_->origin->device) == capture_->origin,
                "a capture must end on the stream that it began on");
    capturing_ = false;
    for (auto& [stream, number] : capture_->streams)
      stream->capture = nullptr;
    const bool invalid = capture_->invalid;
    const bool joined = capture_->joined_after.empty();
    if (invalid || !joined) {
      reset();
      TORCH_CHECK(!invalid, "the capture was invalidated by what may not be done during capture");
      TORCH_CHECK(joined, "the capture has streams that its first stream has not waited for");
    }
    if (!keep_)
      instantiate();
  }

  void instantiate() override {
    TORCH_CHECK(capture_ && !capturing_, "instantiate() without a captured graph");
    ready_ = true;
  }

  // Give all nodes again; side branches on streams of their own, ordered by the captured events.
  void replay() override {
    Giving lock(giving());
    TORCH_CHECK(capture_ && !capturing_, "replay() without a captured graph");
    ready_ = true;
    const int device = capture_->origin->device;
    Stream& first = current_stream(device);
    std::map<int, Draws> draws;
    for (const auto& [index, count] : capture_->draws)
      draws[index] = take(index, count);
    const auto drawn = draws.find(device) == draws.end() ? nullptr : std::make_shared<Draws>(draws.at(device));
    std::map<size_t, RecordPtr> records;
    for (size_t i = 0; i < capture_->nodes.size(); ++i) {
      const Node& node = capture_->nodes[i];
      Stream& stream = node.stream == 0 ? first : stream_at(device, 1 + 2 * kPool + node.stream - 1);
      if (node.kind == Kind::Record)
        records[i] = emulated::record(stream);
      else if (node.kind == Kind::Wait)
        block(stream, records.at(node.awaited));
      else
        submit(stream, node.kind, "graph: " + node.name, node.ranges,
               [work = node.work, drawn](const Draws*) { work(drawn.get()); });
    }
  }

  void reset() override {
    Giving lock(giving());
    if (!capture_)
      return;
    for (auto& [stream, number] : capture_->streams)
      if (stream->capture == capture_.get())
        stream->capture = nullptr;
    release_pool(pool_);
    capture_.reset();
    capturing_ = ready_ = false;
  }

  c10::MempoolId_t pool() const override {
    return {pool_, 0};
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& path) override {
    TORCH_CHECK(capture_, "debug_dump() without a captured graph");
    std::ofstream file(path);
    for (const Node& node : capture_->nodes)
      file << node.stream << " " << node.name << "\n";
  }

 private:
  bool keep_;
  bool capturing_ = false;
  bool ready_ = false;
  uint64_t pool_ = 0;
  std::unique_ptr<Capture> capture_;
};

} // namespace
#endif

} // namespace emulated

#ifdef HAS_GRAPHS
namespace at {
// The name of the device in capitals
REGISTER_GRAPH_IMPL(EMULATED, emulated::Graph)
} // namespace at
#endif
