// Memory of some streams from an allocator of Python's, as CUDA's pools of memory take it from one that is plugged in.
#pragma once

#include <c10/core/Allocator.h>

#include <functional>

#include "streams.h"

namespace emulated {

using Take = std::function<uintptr_t(size_t)>; // bytes → address, 0 if there is no memory
using GiveBack = std::function<void(uintptr_t)>;

// Take the memory of what is allocated while this stream is current from there, until unplugged. What is allocated then
// still goes back there.
void plug_allocator(int device, int stream, Take take, GiveBack give_back);
void unplug_allocator(int device, int stream);

// Allocate there; null if nothing is plugged in, or 0 bytes are asked for. Raises OutOfMemoryError.
c10::DataPtr allocate_plugged(size_t bytes, Stream& stream);

} // namespace emulated
