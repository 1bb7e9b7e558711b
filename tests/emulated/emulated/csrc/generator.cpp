#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>

#include "graph.h"

namespace emulated {

namespace {

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int device)
      : GeneratorImpl(
            c10::Device(kType, static_cast<c10::DeviceIndex>(device)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    draws = {seed, 0};
  }
  void set_offset(uint64_t offset) override {
    draws.offset = offset;
  }
  uint64_t get_offset() const override {
    return draws.offset;
  }
  uint64_t current_seed() const override {
    return draws.seed;
  }
  uint64_t seed() override {
    draws = {c10::detail::getNonDeterministicRandom(), 0};
    return draws.seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == sizeof(Draws) && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.device().is_cpu(),
        "the state of an emulated generator is uint8[", sizeof(Draws), "] on the CPU");
    std::memcpy(&draws, state.data(), sizeof(Draws));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({sizeof(Draws)}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &draws, sizeof(Draws));
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->draws = draws;
    return copy;
  }

  Draws draws{c10::default_rng_seed_val, 0};
};

} // namespace

const at::Generator& default_generator(int device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; ++i)
      all->push_back(new_generator(i));
    return all;
  }();
  return made->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

at::Generator Draw::generator(const Draws* replayed) const {
  const uint64_t base = in_graph && replayed ? replayed->offset : 0;
  uint64_t z = (in_graph && replayed ? replayed->seed : seed) + (base + offset + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  return at::detail::createCPUGenerator(z ^ (z >> 31));
}

Draw draw(const std::optional<at::Generator>& generator, int device) {
  const bool given = generator.has_value() && generator->defined();
  const at::Generator& used = given ? *generator : default_generator(device);
  auto* impl = dynamic_cast<DeviceGenerator*>(used.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl, "Expected a generator of an emulated device, found one of ", used.device());
  std::lock_guard lock(impl->mutex_);
  if (Capture* capture = current_stream(device).capture) {
    TORCH_CHECK(!given || used == default_generator(device), "a graph draws of the default generator only");
    return {impl->draws.seed, capture->draws[device]++, true};
  }
  return {impl->draws.seed, impl->draws.offset++, false};
}

Draws generator_state(int device) {
  return take(device, 0);
}

void set_generator_state(int device, Draws draws) {
  auto* impl = static_cast<DeviceGenerator*>(default_generator(device).unsafeGetGeneratorImpl());
  std::lock_guard lock(impl->mutex_);
  impl->draws = draws;
}

Draws take(int device, uint64_t count) {
  auto* impl = static_cast<DeviceGenerator*>(default_generator(device).unsafeGetGeneratorImpl());
  std::lock_guard lock(impl->mutex_);
  const Draws taken = impl->draws;
  impl->draws.offset += count;
  return taken;
}

} // namespace emulated
