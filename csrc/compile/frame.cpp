#include "frame.h"

namespace neuron {

using c10::IValue;

void Frame::set(uint32_t slot, IValue value) {
  Slot& s = slots_[slot];
  s = {};
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    if (is_neuron(t) && t.layout() == c10::kStrided && !t.is_nested()) s.index = t.device().index();
  }
  s.device = std::move(value);
}

void Frame::set_host(uint32_t slot, IValue value, c10::DeviceIndex index) {
  if (index < 0 || !value.isTensor() || !value.toTensor().defined()) return set(slot, std::move(value));
  slots_[slot] = {{}, std::move(value), index};
}

IValue Frame::take_device(uint32_t slot) {
  device(slot);
  return std::move(slots_[slot].device);
}

IValue Frame::take_host(uint32_t slot) {
  host(slot);
  Slot& s = slots_[slot];
  return std::move(s.index < 0 ? s.device : s.host);
}

const IValue& Frame::raise(Slot& slot) {
  const at::Tensor& host = slot.host.toTensor();
  c10::StorageImpl* twin = host.storage().unsafeGetStorageImpl();
  if (!twin->data_ptr().get_context())
    for (size_t i = twins_.size(); i-- > 0;)
      if (twins_[i].first == twin)
        return slot.device = device_alias(host, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(twins_[i].second));
  at::Tensor adopted = adopt_host_tensor(host, slot.index);
  twins_.emplace_back(twin, adopted.storage().unsafeGetStorageImpl());
  return slot.device = std::move(adopted);
}

const IValue& Frame::lower(Slot& slot) {
  const at::Tensor& device = slot.device.toTensor();
  at::Tensor host = host_alias(device);
  twins_.emplace_back(host.storage().unsafeGetStorageImpl(), device.storage().unsafeGetStorageImpl());
  return slot.host = std::move(host);
}

}  // namespace neuron
