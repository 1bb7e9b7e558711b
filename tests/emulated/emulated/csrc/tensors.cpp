#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>

#include "allocator.h"

namespace emulated {

Range range_of(const at::Tensor& tensor, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0 || begin == 0)
    return {begin, begin, write};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.itemsize(), write};
}

at::Tensor raw(const at::Tensor& tensor) {
  const Range range = range_of(tensor, false);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), range.end - range.begin,
      c10::DataPtr(reinterpret_cast<void*>(range.begin), c10::Device(c10::DeviceType::CPU)),
      c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    impl->set_wrapped_number(true);
  if (tensor.is_conj())
    impl->_set_conj(true);
  if (tensor.is_neg())
    impl->_set_neg(true);
  return made;
}

at::Tensor empty_on_device(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

void launch(
    const std::string& name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written, Work work) {
  std::vector<Range> ranges;
  int device = -1;
  for (const auto* tensors : {&read, &written})
    for (const at::Tensor& tensor : *tensors)
      if (on_device(tensor)) {
        device = tensor.device().index();
        ranges.push_back(range_of(tensor, tensors == &written));
      }
  submit(current_stream(device), Kind::Kernel, name, ranges, std::move(work));
}

} // namespace emulated
