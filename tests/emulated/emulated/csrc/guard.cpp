// What PyTorch asks a device for: the guard of devices, streams and events, the hooks of the accelerator.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "generator.h"
#include "graph.h"
#include "host_memory.h"

namespace emulated {

namespace {

using c10::Device;
using c10::DeviceIndex;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {kType, static_cast<DeviceIndex>(current_device())};
  }
  void setDevice(Device device) const override {
    if (device.index() >= 0)
      set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices)
      set_current_device(device.index());
  }
  c10::Stream getStream(Device device) const override {
    return torch_stream(current_stream(device.index()));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return torch_stream(stream_at(device.index() < 0 ? current_device() : device.index(), 0));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return torch_stream(next_stream(device.index(), high_priority ? -1 : 0));
  }
  c10::Stream getNewStream(Device device, int priority) const override {
    return torch_stream(next_stream(device.index(), priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return torch_stream(exchange_stream(stream_of(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &stream_of(stream);
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    return {};
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query(stream_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream_of(stream));
  }
  bool isStreamCapturing(const c10::Stream& stream) const {  // overrides since PyTorch 2.12
    return stream_of(stream).capture != nullptr;
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator()->recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event)
      *event = new Event;
    static_cast<Event*>(*event)->record = emulated::record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event)
      emulated::block(stream_of(stream), static_cast<Event*>(event)->record);
  }
  bool queryEvent(void* event) const override {
    return !event || query(static_cast<Event*>(event)->record);
  }
  void synchronizeEvent(void* event) const override {
    if (event)
      synchronize(static_cast<Event*>(event)->record);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const auto ns = [](void* event) { return static_cast<Event*>(event)->record->ns.load(); };
    return static_cast<double>(ns(second) - ns(first)) / 1e6;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    set_current_device(device);
  }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const int before = current_device();
    if (device >= 0)
      set_current_device(device);
    return static_cast<DeviceIndex>(before);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device);
  }
  Device getDeviceFromPtr(void* data) const override {
    const int device = device_of_address(data);
    TORCH_CHECK(device >= 0, "The specified pointer resides on host memory and is not registered with any device.");
    return {kType, static_cast<DeviceIndex>(device)};
  }
  bool isPinnedPtr(const void* data) const override {
    return is_registered(reinterpret_cast<uintptr_t>(data), 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return host_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0 && storage.data())
      allocator()->copy_data(data.get(), storage.data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

void register_device() {
  c10::SetAllocator(kType, allocator());
  at::setHostAllocator(kType, host_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  // Otherwise no memory counts as pinned before PyTorch has allocated some.
  at::globalContext().lazyInitDevice(kType);
}

} // namespace emulated
