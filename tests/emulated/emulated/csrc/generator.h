// The generators of random numbers: a seed and an offset on the host, taken when a kernel is given.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

#include "streams.h"

namespace emulated {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// Numbers drawn by one kernel. In a graph they come after those that the generator has given at the replay.
struct Draw {
  uint64_t seed;
  uint64_t offset; // in a graph: from the first draw of the graph
  bool in_graph;

  // The CPU generator of the kernel.
  at::Generator generator(const Draws* replayed) const;
};
Draw draw(const std::optional<at::Generator>& generator, int device);
Draws generator_state(int device); // of the default generator
void set_generator_state(int device, Draws draws);
// Take `count` offsets of the default generator.
Draws take(int device, uint64_t count);

} // namespace emulated
