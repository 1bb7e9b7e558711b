// Any operator of PyTorch on the device: shapes from its meta kernel, the CPU kernel later on the stream's thread.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <set>
#include <string>

namespace emulated {

// Run `op` with the arguments on the stack. `reported` is the operator's name in reports.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::string& reported);

// Register the fallback for operators that PyTorch would compose although the CPU has a kernel.
void prefer_cpu_kernels();

// Names of the operators that made the host wait, since the last call.
std::set<std::string> take_waiting_operators();

} // namespace emulated
