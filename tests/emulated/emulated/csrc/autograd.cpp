// What needs the headers of autograd, which take long to compile.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace emulated {

bool in_backward() {
  return torch::autograd::get_current_node() != nullptr;
}

// `tensor.data = other` between the CPU and the device. PyTorch permits it for its own devices and refuses PrivateUse1.
void set_data(PyObject* tensor, PyObject* data) {
  const at::Tensor& self = THPVariable_Unpack(tensor);
  const at::Tensor& other = THPVariable_Unpack(data);
  TORCH_CHECK(self.scalar_type() == other.scalar_type(), "tensor and new data have different types");
  TORCH_CHECK(
      self.layout() == at::kStrided && other.layout() == at::kStrided, "only strided tensors take the data of others");
  if (auto* meta = torch::autograd::impl::get_autograd_meta(self)) {
    // It adds gradients of the old device.
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  self.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

} // namespace emulated
