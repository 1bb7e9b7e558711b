#include "plugged.h"

#include <Python.h>
#include <c10/util/Exception.h>

#include <map>

#include "allocator.h"

namespace emulated {

namespace {

struct Plugged {
  Take take;
  GiveBack give_back;
};
using PluggedPtr = std::shared_ptr<const Plugged>;

struct Owned {
  PluggedPtr allocator;
  uintptr_t address;
  size_t bytes;
  int device;
};

// By stream; never destroyed. giving() is held for it, but not while Python is called, which may wait for the GIL.
std::map<const Stream*, PluggedPtr>& plugged() {
  static auto* all = new std::map<const Stream*, PluggedPtr>;
  return *all;
}

void give_back_plugged(void* context) {
  std::unique_ptr<Owned> owned(static_cast<Owned*>(context));
  if (Py_IsInitialized()) {
    count_plugged(owned->device, -static_cast<int64_t>(owned->bytes));
    owned->allocator->give_back(owned->address);
  } else {
    new PluggedPtr(owned->allocator); // Python's objects cannot be released any more
  }
}

} // namespace

void plug_allocator(int device, int stream, Take take, GiveBack give_back) {
  auto made = std::make_shared<const Plugged>(Plugged{std::move(take), std::move(give_back)});
  Giving lock(giving());
  const bool is_new = plugged().emplace(&stream_at(device, stream), std::move(made)).second;
  TORCH_CHECK(is_new, "stream ", stream, " has an allocator already");
}

void unplug_allocator(int device, int stream) {
  PluggedPtr last; // released without the lock
  Giving lock(giving());
  const auto found = plugged().find(&stream_at(device, stream));
  TORCH_CHECK(found != plugged().end(), "stream ", stream, " has no allocator");
  last = std::move(found->second);
  plugged().erase(found);
}

c10::DataPtr allocate_plugged(size_t bytes, Stream& stream) {
  PluggedPtr allocator;
  {
    Giving lock(giving());
    const auto found = plugged().find(&stream);
    if (found == plugged().end() || bytes == 0)
      return {};
    allocator = found->second;
  }
  const uintptr_t address = allocator->take(bytes);
  TORCH_CHECK_WITH(
      OutOfMemoryError, address != 0, "emulated device ", stream.device, " out of memory. Tried to allocate ", bytes,
      " bytes for ", stream.text(), ".");
  count_plugged(stream.device, static_cast<int64_t>(bytes));
  auto* owned = new Owned{std::move(allocator), address, bytes, stream.device};
  return {reinterpret_cast<void*>(address), owned, &give_back_plugged,
          c10::Device(kType, static_cast<c10::DeviceIndex>(stream.device))};
}

} // namespace emulated
