// Operators that the fallback cannot do: memory and views, scalars, and those that have no CPU kernel of the same name.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "allocator.h"
#include "fallback.h"
#include "generator.h"
#include "tensors.h"

namespace emulated {

namespace {

// ---- memory ----------------------------------------------------------------------------------------------------------

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index()
      ? *device
      : c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
}

at::Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "an emulated device has strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> type,
    std::optional<at::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "an emulated device has strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  return empty_on_device(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(type),
      device_or_current(device));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef symbolic_sizes, std::optional<at::MemoryFormat> format) {
  const at::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(symbolic_sizes);
  if (self.sizes() != sizes) {
    c10::TensorImpl* impl = self.unsafeGetTensorImpl();
    const size_t bytes =
        at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
    impl->set_sizes_contiguous(sizes);
    if (impl->numel() > 0 && bytes > self.storage().nbytes())
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  const auto from = offset.has_value() ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), from);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::cpu::set_(
      self, std::move(storage), offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(sizes),
      C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_nothing(at::Tensor& self) {
  return at::cpu::set_(self, at::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), allocator(), true)),
      0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

// ---- the same operator by another name on the CPU --------------------------------------------------------------------

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run_operator(find("aten::convolution"), stack, "aten::convolution");
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  // (grad, input, weight, stride …) becomes (grad, input, weight, bias's sizes, stride …)
  const at::Tensor grad = torch::jit::peek(*stack, 0, 10).toTensor();
  stack->insert(stack->end() - 7, c10::IValue(c10::List<int64_t>({grad.size(1)})));
  run_operator(find("aten::convolution_backward"), stack, "aten::convolution_backward");
}

// ---- no CPU kernel, or one that draws of the CPU's generator ---------------------------------------------------------

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  at::Tensor output = at::empty_like(input), mask = at::empty_like(input, input.options().dtype(at::kBool));
  const bool drops = !train.has_value() || *train;
  const double kept = 1 - p, scale = kept == 0 ? 0. : 1. / kept;
  const Draw drawn = draw(std::nullopt, input.device().index());
  launch("aten::native_dropout", {input}, {output, mask},
         [=, from = raw(input), to = raw(output), bits = raw(mask)](const Draws* replayed) {
           if (!drops) {
             bits.fill_(1);
             to.copy_(from);
             return;
           }
           bits.bernoulli_(kept, drawn.generator(replayed));
           to.copy_(from.mul(bits).mul_(scale));
         });
  return {output, mask};
}

using Cell2 = std::tuple<at::Tensor, at::Tensor>;
using Cell3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor raw_or_none(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? raw(*tensor) : at::Tensor();
}

// Gates i, f, g, o; the workspace keeps them activated.
Cell3 lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor hy = at::empty_like(cx), cy = at::empty_like(cx), workspace = at::empty_like(input_gates);
  std::vector<at::Tensor> read{input_gates, hidden_gates, cx};
  for (const auto* bias : {&input_bias, &hidden_bias})
    if (bias->has_value() && (*bias)->defined())
      read.push_back(**bias);
  launch("aten::_thnn_fused_lstm_cell", read, {hy, cy, workspace},
         [from = raw(input_gates), hidden = raw(hidden_gates), c = raw(cx), b1 = raw_or_none(input_bias),
          b2 = raw_or_none(hidden_bias), h_out = raw(hy), c_out = raw(cy), kept = raw(workspace)](const Draws*) {
           at::Tensor gates = from + hidden;
           if (b1.defined())
             gates = gates + b1 + b2;
           auto parts = gates.chunk(4, 1);
           const at::Tensor i = parts[0].sigmoid_(), f = parts[1].sigmoid_(), g = parts[2].tanh_(),
                            o = parts[3].sigmoid_();
           c_out.copy_(f * c + i * g);
           h_out.copy_(o * c_out.tanh());
           kept.copy_(gates);
         });
  return {hy, cy, workspace};
}

Cell3 lstm_cell_backward(
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  at::Tensor grad_gates = at::empty_like(workspace), grad_cx = at::empty_like(cx);
  at::Tensor grad_bias = has_bias ? at::empty({workspace.size(1)}, workspace.options()) : at::Tensor();
  std::vector<at::Tensor> read{cx, cy, workspace}, written{grad_gates, grad_cx};
  for (const auto* grad : {&grad_hy, &grad_cy})
    if (grad->has_value() && (*grad)->defined())
      read.push_back(**grad);
  if (has_bias)
    written.push_back(grad_bias);
  launch("aten::_thnn_fused_lstm_cell_backward_impl", read, written,
         [gh = raw_or_none(grad_hy), gc = raw_or_none(grad_cy), c = raw(cx), c_new = raw(cy), kept = raw(workspace),
          to = raw(grad_gates), to_c = raw(grad_cx), to_b = raw_or_none(grad_bias)](const Draws*) {
           const auto parts = kept.chunk(4, 1);
           const at::Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
           const at::Tensor tanh_c = c_new.tanh();
           const at::Tensor h = gh.defined() ? gh : at::zeros_like(c_new);
           at::Tensor grad_c = h * o * (1 - tanh_c * tanh_c);
           if (gc.defined())
             grad_c = grad_c + gc;
           to.copy_(at::cat(
               {grad_c * g * i * (1 - i), grad_c * c * f * (1 - f), grad_c * i * (1 - g * g), h * tanh_c * o * (1 - o)},
               1));
           to_c.copy_(grad_c * f);
           if (to_b.defined())
             to_b.copy_(to.sum(0));
         });
  return {grad_gates, grad_cx, grad_bias};
}

// Gates r, z, n; the workspace keeps r, z, n, the hidden state and the hidden part of n.
Cell2 gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor hy = at::empty_like(hx);
  at::Tensor workspace = at::empty({hx.size(0), hx.size(1) * 5}, hx.options());
  std::vector<at::Tensor> read{input_gates, hidden_gates, hx};
  for (const auto* bias : {&input_bias, &hidden_bias})
    if (bias->has_value() && (*bias)->defined())
      read.push_back(**bias);
  launch("aten::_thnn_fused_gru_cell", read, {hy, workspace},
         [from = raw(input_gates), hidden = raw(hidden_gates), h = raw(hx), b1 = raw_or_none(input_bias),
          b2 = raw_or_none(hidden_bias), to = raw(hy), kept = raw(workspace)](const Draws*) {
           const auto x = (b1.defined() ? from + b1 : from).chunk(3, 1);
           const auto y = (b2.defined() ? hidden + b2 : hidden).chunk(3, 1);
           const at::Tensor r = (x[0] + y[0]).sigmoid(), z = (x[1] + y[1]).sigmoid(), n = (x[2] + r * y[2]).tanh();
           kept.copy_(at::cat({r, z, n, h, y[2]}, 1));
           to.copy_((h - n) * z + n);
         });
  return {hy, workspace};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  const int64_t rows = workspace.size(0), width = workspace.size(1) / 5;
  at::Tensor grad_input = at::empty({rows, 3 * width}, workspace.options());
  at::Tensor grad_hidden = at::empty_like(grad_input), grad_hx = at::empty_like(grad_hy);
  const auto bias = [&] { return has_bias ? at::empty({3 * width}, workspace.options()) : at::Tensor(); };
  at::Tensor grad_b1 = bias(), grad_b2 = bias();
  std::vector<at::Tensor> written{grad_input, grad_hidden, grad_hx};
  if (has_bias)
    written.insert(written.end(), {grad_b1, grad_b2});
  launch("aten::_thnn_fused_gru_cell_backward", {grad_hy, workspace}, written,
         [grad = raw(grad_hy), kept = raw(workspace), to_x = raw(grad_input), to_h = raw(grad_hidden),
          to_hx = raw(grad_hx), to_b1 = raw_or_none(grad_b1), to_b2 = raw_or_none(grad_b2)](const Draws*) {
           const auto parts = kept.chunk(5, 1);
           const at::Tensor &r = parts[0], &z = parts[1], &n = parts[2], &h = parts[3], &hn = parts[4];
           const at::Tensor gz = grad * (h - n) * z * (1 - z), gn = grad * (1 - z) * (1 - n * n);
           const at::Tensor gr = gn * hn * r * (1 - r);
           to_x.copy_(at::cat({gr, gz, gn}, 1));
           to_h.copy_(at::cat({gr, gz, gn * r}, 1));
           to_hx.copy_(grad * z);
           if (to_b1.defined()) {
             to_b1.copy_(to_x.sum(0));
             to_b2.copy_(to_h.sum(0));
           }
         });
  return {grad_input, grad_hidden, grad_hx, grad_b1, grad_b2};
}

// Attention is composed of matrix products and softmax.
int64_t attention_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("unfold", &unfold);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("native_dropout", &native_dropout);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
}

} // namespace emulated
