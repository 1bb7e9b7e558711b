#include "fallback.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <exception>

#include "call.h"
#include "graph.h"
#include "tensors.h"

namespace emulated {

namespace {

using c10::DispatchKey;

std::set<std::string>& waiting() {
  static auto* names = new std::set<std::string>;
  return *names;
}

void store(const at::Tensor& result, const at::Tensor& place, const std::string& name) {
  TORCH_CHECK(result.defined(), name, " makes a result less than its meta kernel says");
  if (name == "aten::native_batch_norm" && result.numel() == 0) {
    // In evaluation the CPU returns no statistics, and CUDA returns some that nothing uses: NaN shows if something does.
    std::memset(place.mutable_data_ptr(), 0xff, place.nbytes());
    return;
  }
  TORCH_CHECK(
      result.sizes() == place.sizes() && result.scalar_type() == place.scalar_type(), name, " makes ", result.sizes(),
      " of ", result.scalar_type(), " but its meta kernel says ", place.sizes(), " of ", place.scalar_type());
  if (result.strides() == place.strides() && place.is_non_overlapping_and_dense())
    std::memcpy(place.mutable_data_ptr(), result.const_data_ptr(), place.nbytes());
  else
    place.copy_(result);
}

// The CPU kernel, on the worker's thread, with as many threads as the caller has
Stack run_on_cpu(const Call& call, const Stack& arguments, int threads, const Draws* replayed) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (at::get_num_threads() != threads)
    at::set_num_threads(threads);
  Stack stack = arguments;
  if (call.generator)
    stack[*call.generator] = IValue(call.drawn->generator(replayed));
  for (const size_t i : call.written)
    stack[i] = raw(arguments[i].toTensor());
  const Stack given = stack;
  call.op.callBoxed(&stack);
  for (const size_t i : call.written) {
    const at::Tensor &result = given[i].toTensor(), &place = arguments[i].toTensor();
    if (result.const_data_ptr() != place.const_data_ptr()) // it was larger for a while
      store(result, place, call.name);
  }
  return stack;
}

// Results that are new tensors, in order; those that are arguments are left out.
std::vector<at::Tensor> new_tensors(const c10::FunctionSchema& schema, const Stack& results) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < results.size(); ++i)
    if (!schema.returns()[i].alias_info()) {
      if (results[i].isTensor())
        tensors.push_back(results[i].toTensor());
      else if (results[i].isTensorList())
        for (const at::Tensor& tensor : results[i].toTensorVector())
          tensors.push_back(tensor);
    }
  return tensors;
}

// The results as the caller gets them: arguments by their alias, `fresh` for the others.
void push_results(const Call& call, const Stack& results, const std::vector<at::Tensor>& fresh, Stack* stack) {
  size_t next = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    if (const auto* alias = call.schema.returns()[i].alias_info()) {
      TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), call.name, " makes a view, which the emulated device has no kernel for");
      for (size_t j = 0; j < call.arguments.size(); ++j) {
        const auto* other = call.schema.arguments()[j].alias_info();
        if (other && other->beforeSets() == alias->beforeSets()) {
          stack->push_back(call.arguments[j]);
          break;
        }
      }
    } else if (results[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (size_t count = results[i].toTensorVector().size(); count > 0; --count)
        list.push_back(fresh[next++]);
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(results[i].isTensor() ? IValue(fresh[next++]) : results[i]);
    }
  }
}

// out= arguments take the shape that their meta tensors have got.
void resize_outputs(Call& call, const Shapes& shapes) {
  for (const auto& [i, shape] : shapes.written) {
    const at::Tensor& target = call.arguments[i].toTensor();
    if (!target.defined() || (target.sizes() == shape.sizes() && target.strides() == shape.strides()))
      continue;
    target.resize_(shape.sizes());
    target.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
    call.cpu[i] = raw(target);
    call.ranges.push_back(range_of(target, true));
  }
}

// With results that only the CPU kernel knows: the host waits for it.
void run_waiting(const std::shared_ptr<Call>& call, Stream& stream, Stack* stack) {
  Capture::forbid(stream.capture, call->name.c_str());
  {
    Giving lock(giving());
    waiting().insert(call->name);
  }
  auto results = std::make_shared<Stack>();
  auto error = std::make_shared<std::exception_ptr>();
  const int threads = at::get_num_threads();
  submit(stream, Kind::Kernel, call->name, call->ranges, [=](const Draws* replayed) {
    try {
      *results = run_on_cpu(*call, call->cpu, threads, replayed);
    } catch (...) {
      *error = std::current_exception();
    }
  });
  synchronize(stream);
  if (*error)
    std::rethrow_exception(*error);
  std::vector<at::Tensor> fresh;
  for (const at::Tensor& result : new_tensors(call->schema, *results)) {
    if (!result.defined()) {
      fresh.emplace_back();
      continue;
    }
    fresh.push_back(empty_on_device(result.sizes(), result.strides(), result.scalar_type(), call->device));
    const at::Tensor place = raw(fresh.back());
    submit(stream, Kind::Kernel, call->name, {range_of(fresh.back(), true)},
           [result, place, name = call->name](const Draws*) { store(result, place, name); });
  }
  push_results(*call, *results, fresh, stack);
}

} // namespace

void run_operator(const c10::OperatorHandle& op, Stack* stack, const std::string& reported) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
  const auto call = std::make_shared<Call>(op, *stack, reported);
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(DispatchKey::CPU) || op.hasComputedKernelForDispatchKey(DispatchKey::CPU), reported,
      " has no CPU kernel, so the emulated device has none");
  TORCH_CHECK_NOT_IMPLEMENTED(
      call->generator || !call->has_tag(at::Tag::nondeterministic_seeded), reported,
      " draws random numbers of a generator that it does not take");
  torch::jit::drop(*stack, op.schema().arguments().size());
  Stream& stream = current_stream(call->device.index());
  const c10::DeviceGuard device(call->device);
  const auto shapes = call->needs_the_host() ? nullptr : shapes_of(*call);
  if (!shapes)
    return run_waiting(call, stream, stack);
  resize_outputs(*call, *shapes);
  std::vector<at::Tensor> fresh, places;
  for (const at::Tensor& shape : new_tensors(call->schema, shapes->results)) {
    fresh.push_back(
        shape.defined() ? empty_on_device(shape.sizes(), shape.strides(), shape.scalar_type(), call->device)
                        : at::Tensor());
    places.push_back(shape.defined() ? raw(fresh.back()) : at::Tensor());
    if (shape.defined())
      call->ranges.push_back(range_of(fresh.back(), true));
  }
  push_results(*call, shapes->results, fresh, stack);
  call->arguments.clear(); // nothing keeps the blocks of the arguments but their owners
  call->meta.clear();
  const int threads = at::get_num_threads();
  submit(stream, Kind::Kernel, reported, call->ranges, [call, places, threads](const Draws* replayed) {
    const Stack results = run_on_cpu(*call, call->cpu, threads, replayed);
    const std::vector<at::Tensor> made = new_tensors(call->schema, results);
    for (size_t i = 0; i < places.size(); ++i)
      if (places[i].defined())
        store(made[i], places[i], call->name);
  });
}

std::set<std::string> take_waiting_operators() {
  Giving lock(giving());
  return std::exchange(waiting(), {});
}

namespace {

void boxed(const c10::OperatorHandle& op, Stack* stack) {
  const auto& name = op.operator_name();
  run_operator(op, stack, name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
}

} // namespace


TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>());
}


// PyTorch prefers a composition of other operators to the fallback. Where the CPU has a kernel of its own, that is what
// the bits come from, so it is what runs here.
void prefer_cpu_kernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0 || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    bool composed = false;
    for (const c10::DispatchKey key : {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::CompositeExplicitAutograd})
      composed |= op->hasKernelForDispatchKey(key);
    if (composed)
      library->impl(
          (name.name + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
          torch::CppFunction::makeFromBoxedFunction<&boxed>());
  }
}

} // namespace emulated
