// A call of an operator of the device while it is prepared.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "generator.h"
#include "streams.h"

namespace emulated {

using torch::jit::Stack;
using c10::IValue;

struct Call {
  const c10::OperatorHandle op;
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<IValue> arguments;
  c10::Device device{kType, 0};
  std::vector<Range> ranges;
  Stack meta; // the arguments on the meta device
  Stack cpu;  // and on the CPU
  std::vector<size_t> written;     // numbers of the single tensors that are written
  std::optional<size_t> generator; // number of that argument
  std::optional<Draw> drawn;

  Call(const c10::OperatorHandle& called, const Stack& stack, const std::string& reported);
  bool is_written(size_t number) const;
  bool has_tag(at::Tag tag) const;
  // Whether the results cannot be known, or are not tensors, before the CPU kernel has run.
  bool needs_the_host() const;
  // What the shapes of the results depend on; "" if that cannot be said.
  std::string key() const;

 private:
  void find_device();
  void prepare();
};

// Results and written arguments of a call on the meta device.
struct Shapes {
  Stack results;
  std::map<size_t, at::Tensor> written;
};

// From the meta kernel, or null if there is none. They are remembered, because many meta kernels are written in Python.
std::shared_ptr<const Shapes> shapes_of(Call& call);

} // namespace emulated
