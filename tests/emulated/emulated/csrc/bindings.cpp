// What the Python package calls.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <thread>

#include "allocator.h"
#include "fallback.h"
#include "generator.h"
#include "graph.h"
#include "host_memory.h"

namespace py = pybind11;

namespace emulated {

void register_device();                       // guard.cpp
void set_data(PyObject* tensor, PyObject* data); // autograd.cpp

namespace {

constexpr double kCyclesPerNanosecond = 2;

void sleep_cycles(int64_t cycles) {
  const auto duration = std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(cycles) / kCyclesPerNanosecond));
  submit(current_stream(-1), Kind::Kernel, "sleep", {}, [=](const Draws*) { std::this_thread::sleep_for(duration); });
}

std::vector<std::string> races() {
  Giving lock(giving());
  return detector().reports;
}

std::pair<uint64_t, uint64_t> random_state(int device) {
  const Draws draws = generator_state(device);
  return {draws.seed, draws.offset};
}

void set_random_state(int device, uint64_t seed, uint64_t offset) {
  set_generator_state(device, {seed, offset});
}

template <typename F>
void define(py::module_& module, const char* name, F function) {
  module.def(name, function, py::call_guard<py::gil_scoped_release>());
}

} // namespace

PYBIND11_MODULE(_native, module) {
  register_device();
  prefer_cpu_kernels();
  module.attr("DEVICES") = kDevices;
  module.attr("POOL") = kPool;
  module.def("set_data", [](py::handle tensor, py::handle data) { set_data(tensor.ptr(), data.ptr()); });
  define(module, "schedule", &set_schedule);
  define(module, "races", &races);
  define(module, "clear", &clear_clocks);
  define(module, "drain", &drain);
  define(module, "pending", &pending);
  define(module, "streams_used", &streams_used);
  define(module, "set_stacks", &set_stacks);
  define(module, "clear_failure", &clear_failure);
  define(module, "fail_kernel", &fail_kernel);
  define(module, "fail_allocation", &fail_allocation);
  define(module, "sleep", &sleep_cycles);
  define(module, "watch_threads", &watch_threads);
  define(module, "host_releases", &host_releases);
  define(module, "host_acquires", &host_acquires);
  define(module, "host_forgets_lock", &host_forgets_lock);
  define(module, "host_register", &host_register);
  define(module, "host_unregister", &host_unregister);
  define(module, "host_access", &host_access);
  define(module, "is_registered", &is_registered);
  define(module, "registered_bytes", &registered_bytes);
  define(module, "current_device", &current_device);
  define(module, "set_device", &set_current_device);
  define(module, "set_memory_fraction", &set_memory_fraction);
  define(module, "memory_fraction", &memory_fraction);
  define(module, "set_memory", &set_memory);
  define(module, "total_memory", &total_memory);
  define(module, "reserved_memory", &reserved_memory);
  define(module, "blocks_alive", &blocks_alive);
  define(module, "trace_allocations", &trace_allocations);
  define(module, "allocation_trace", &allocation_trace);
  define(module, "random_state", &random_state);
  define(module, "set_random_state", &set_random_state);
  define(module, "take_waiting_operators", &take_waiting_operators);
}

} // namespace emulated
