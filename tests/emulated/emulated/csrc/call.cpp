#include "call.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <mutex>
#include <unordered_map>

#include "tensors.h"

namespace emulated {

namespace {

// Operators with arguments that may be CPU tensors of any size: indices, lengths.
bool takes_host_tensors(const std::string& name) {
  return name.find("index") != std::string::npos || name.find("packed") != std::string::npos;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0)
    return tensor; // a number, welcome on every device
  at::Tensor made = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  if (tensor.is_conj())
    impl->_set_conj(true);
  if (tensor.is_neg())
    impl->_set_neg(true);
  return made;
}

// Apply `change` to every tensor of a value; other values stay as they are.
template <typename F>
IValue changed(const IValue& value, const F& change) {
  if (value.isTensor())
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor.has_value() && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

template <typename F>
void each_tensor(const IValue& value, const F& visit) {
  changed(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// The value of a host tensor now.
at::Tensor taken(const at::Tensor& tensor) {
  at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  copy.copy_(tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

bool append(std::string& text, const IValue& value) {
  const auto raw_bytes = [&](const auto& number) {
    text.append(reinterpret_cast<const char*>(&number), sizeof(number));
  };
  text += static_cast<char>('a' + value.isTensor() + 2 * value.isInt() + 4 * value.isDouble() + 8 * value.isNone());
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor tensor = value.toTensor();
    raw_bytes(tensor.scalar_type());
    raw_bytes(tensor.is_cpu() + 2 * tensor.unsafeGetTensorImpl()->is_wrapped_number());
    for (const auto list : {tensor.sizes(), tensor.strides()}) {
      raw_bytes(list.size());
      for (const int64_t number : list)
        raw_bytes(number);
    }
  } else if (value.isList()) {
    raw_bytes(value.toListRef().size());
    for (const IValue& element : value.toListRef())
      if (!append(text, element))
        return false;
  } else if (value.isInt()) {
    raw_bytes(value.toInt());
  } else if (value.isDouble()) {
    raw_bytes(value.toDouble());
  } else if (value.isBool()) {
    raw_bytes(value.toBool());
  } else if (value.isString()) {
    text += value.toStringRef();
  } else {
    return value.isNone() || value.isTensor() || value.isDevice();
  }
  return true;
}

} // namespace

Call::Call(const c10::OperatorHandle& called, const Stack& stack, const std::string& reported)
    : op(called), schema(called.schema()), name(reported) {
  arguments.assign(stack.end() - schema.arguments().size(), stack.end());
  find_device();
  prepare();
}

void Call::find_device() {
  device = c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
  bool found = false;
  for (const IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!on_device(tensor))
        return;
      TORCH_CHECK(!found || tensor.device() == device, "Expected all tensors to be on the same device, but ", name,
                  " got some on ", device, " and on ", tensor.device());
      device = tensor.device();
      found = true;
    });
    if (!found && argument.isDevice() && argument.toDevice().type() == kType && argument.toDevice().has_index())
      device = argument.toDevice();
  }
}

// Statistics of batch norm are written although the schema does not say so.
bool Call::is_written(size_t number) const {
  const auto* alias = schema.arguments()[number].alias_info();
  if (alias && alias->isWrite())
    return true;
  return (schema.name() == "aten::native_batch_norm") && (number == 3 || number == 4) && arguments[5].toBool();
}

void Call::prepare() {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& argument = arguments[i];
    if (schema.arguments()[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      generator = i;
      std::optional<at::Generator> given;
      if (argument.isGenerator())
        given = argument.toGenerator();
      drawn = draw(given, device.index());
      meta.emplace_back();
      cpu.emplace_back();
      continue;
    }
    if (argument.isDevice()) {
      meta.emplace_back(c10::Device(c10::kMeta));
      cpu.emplace_back(c10::Device(c10::kCPU));
      continue;
    }
    const bool is_output = is_written(i);
    if (is_output && argument.isTensor() && argument.toTensor().defined())
      written.push_back(i);
    meta.push_back(changed(argument, on_meta));
    cpu.push_back(changed(argument, [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        ranges.push_back(range_of(tensor, is_output));
        return raw(tensor);
      }
      TORCH_CHECK(!is_output && tensor.is_cpu() && (tensor.dim() == 0 || takes_host_tensors(schema.name())),
                  "Expected all tensors to be on the same device, but ", name, " got one on ", tensor.device());
      return taken(tensor);
    }));
  }
}

bool Call::has_tag(at::Tag tag) const {
  const auto& tags = op.getTags();
  return std::find(tags.begin(), tags.end(), tag) != tags.end();
}

bool Call::needs_the_host() const {
  for (const c10::Argument& result : schema.returns()) {
    const auto& type = *result.type();
    if (!type.isSubtypeOf(*c10::TensorType::get()) && !type.isSubtypeOf(*c10::ListType::ofTensors()))
      return true;
  }
  return has_tag(at::Tag::data_dependent_output) || has_tag(at::Tag::dynamic_output_shape);
}

std::string Call::key() const {
  std::string text = name;
  for (const IValue& value : meta)
    if (!append(text, value))
      return "";
  return text;
}



std::shared_ptr<const Shapes> shapes_of(Call& call) {
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<const Shapes>>;
  static auto* mutex = new std::mutex;
  const std::string key = call.key();
  if (!key.empty()) {
    const std::lock_guard lock(*mutex);
    const auto found = known->find(key);
    if (found != known->end())
      return found->second;
  }
  auto made = std::make_shared<Shapes>();
  if (call.schema.returns().empty())
    return made; // it writes its arguments and makes nothing
  made->results = call.meta;
  bool has_kernel = true;
  try {
    call.op.callBoxed(&made->results);
  } catch (const c10::NotImplementedError&) {
    has_kernel = false;
  } catch (const std::exception& error) { // of a meta kernel in Python
    if (std::string(error.what()).find("NotImplementedError") == std::string::npos)
      throw;
    has_kernel = false;
  }
  for (const size_t i : call.written)
    made->written.emplace(i, call.meta[i].toTensor());
  std::shared_ptr<const Shapes> shapes = has_kernel ? made : nullptr;
  if (!key.empty()) {
    const std::lock_guard lock(*mutex);
    known->emplace(key, shapes);
  }
  return shapes;
}

} // namespace emulated
