// Tensors of the device as the workers see them: CPU tensors on the same memory, which own nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include "streams.h"

namespace emulated {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// The bytes from the first to the last element.
Range range_of(const at::Tensor& tensor, bool write);

// A CPU tensor on the memory of `tensor`, which must outlive every use of it. If a kernel makes it larger it gets memory
// of its own.
at::Tensor raw(const at::Tensor& tensor);

at::Tensor empty_on_device(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device);

// A kernel on the current stream of the tensors' device.
void launch(
    const std::string& name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written, Work work);

} // namespace emulated
