// What ATen asks a backend for: device control, generators, pinned memory, storage resizing.
#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "allocator.h"
#include "generator.h"
#include "pinned.h"

namespace neuron {

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const c10::Device device = storage.device();
  synchronize_device(device.index());
  c10::DataPtr fresh = allocate_on(device.index(), bytes, device);
  if (size_t keep = std::min(bytes, storage.nbytes())) {
    TORCH_CHECK(storage.data(), "neuron storage of ", storage.nbytes(), " bytes has no memory to resize.");
    device_allocator()->copy_data(fresh.mutable_get(), storage.data(), keep);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

namespace {

struct NeuronHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return neuron::device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialized(); }
  void init() const override { device_state(current_device()); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    c10::DeviceIndex old = current_device();
    set_current_device(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? -1 : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned_pointer(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    Block* block = MemoryPool::find(data);
    for (int i = 0; block && i < neuron::device_count(); i++)
      if (block->segment->pool == &device_state(i).pool) return {kNeuron, static_cast<c10::DeviceIndex>(i)};
    TORCH_CHECK(false, "The pointer ", data, " is not in the memory of a neuron device.");
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<NeuronGenerator>(resolve_device(index));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new NeuronHooks); }

}  // namespace neuron
