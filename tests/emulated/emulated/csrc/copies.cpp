// Copies: over the link asynchronous from and to pinned memory only, as CUDA's.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "graph.h"
#include "host_memory.h"
#include "tensors.h"

namespace emulated {

namespace {

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  const bool dense = (a.is_contiguous() && b.is_contiguous()) ||
      (a.strides() == b.strides() && a.is_non_overlapping_and_dense());
  return dense && a.dtype() == b.dtype() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void on_one_device(const at::Tensor& source, const at::Tensor& target) {
  const bool plain = same_layout(source, target);
  const at::Tensor from = raw(source), to = raw(target);
  launch("copy on the device", {source}, {target}, [=](const Draws*) {
    if (plain)
      std::memmove(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    else
      to.copy_(from);
  });
}

// On the source's stream, between waits of both streams for each other
void between_devices(const at::Tensor& source, const at::Tensor& target) {
  const at::Tensor dense = same_layout(source, target) ? source : at::empty_like(target, source.options());
  if (!dense.is_same(source)) {
    const_cast<at::Tensor&>(dense).copy_(source);
    if (!same_layout(dense, target)) { // another type: convert on the source's device
      const at::Tensor converted = at::empty_like(target, dense.options().dtype(target.dtype()));
      const_cast<at::Tensor&>(converted).copy_(dense);
      return between_devices(converted, target);
    }
  }
  Stream& from = current_stream(dense.device().index());
  Stream& to = current_stream(target.device().index());
  block(from, record(to));
  const at::Tensor raw_source = raw(dense), raw_target = raw(target);
  submit(from, Kind::Copy, "copy between devices", {range_of(dense, false), range_of(target, true)},
         [=](const Draws*) { std::memcpy(raw_target.mutable_data_ptr(), raw_source.const_data_ptr(), raw_target.nbytes()); });
  block(to, record(from));
}

// Same layout on both sides; one is on the host.
void over_the_link(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool out = on_device(source);
  const at::Tensor& host = out ? target : source;
  const Range place = range_of(host, out);
  const size_t bytes = place.end - place.begin;
  if (bytes == 0)
    return;
  const bool pinned = is_registered(place.begin, bytes);
  Stream& stream = current_stream((out ? source : target).device().index());
  if (!pinned || !non_blocking)
    Capture::forbid(stream.capture, "a copy that the host waits for");
  std::vector<Range> ranges{range_of(source, false), range_of(target, true)};
  const Range unpinned = ranges[out ? 1 : 0];
  if (!pinned)
    std::erase_if(ranges, [&](const Range& range) { return range.begin == unpinned.begin; });
  void* to = target.mutable_data_ptr();
  const void* from = source.const_data_ptr();
  submit(stream, Kind::Copy, std::string("copy ") + (out ? "from" : "to") + " the device", ranges, [=](const Draws*) {
    TORCH_CHECK(is_mapped(place.begin, bytes), "a copy of host memory that is not mapped any more");
    std::memcpy(to, from, bytes);
  });
  if (pinned)
    host_memory_used(place.begin, stream);
  if (!pinned || !non_blocking)
    synchronize(stream);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const at::Tensor source = self.sizes() == target.sizes() ? self : self.expand_as(target);
  if (target.numel() == 0)
    return target;
  if (on_device(source) && on_device(target)) {
    source.device() == target.device() ? on_one_device(source, target) : between_devices(source, target);
    return target;
  }
  if (same_layout(source, target)) {
    over_the_link(source, target, non_blocking);
    return target;
  }
  // Through temporaries of one layout on both sides; types are converted where the source is.
  const bool keep = target.is_non_overlapping_and_dense();
  at::Tensor dense = keep ? at::empty_strided(target.sizes(), target.strides(), source.options().dtype(target.dtype()))
                          : at::empty(target.sizes(), source.options().dtype(target.dtype()));
  dense.copy_(source);
  if (same_layout(dense, target)) {
    over_the_link(dense, target, non_blocking && on_device(dense));
    return target;
  }
  at::Tensor arrived = at::empty_strided(dense.sizes(), dense.strides(), target.options());
  over_the_link(dense, arrived, false);
  const_cast<at::Tensor&>(target).copy_(arrived);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  const_cast<at::Tensor&>(target).resize_(self.sizes());
  return copy_from(self, target, false);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

} // namespace emulated
