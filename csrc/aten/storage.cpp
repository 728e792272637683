#include "storage.h"

#include <mutex>

#include "graph.h"

namespace neuron {

namespace {

c10::DataPtr borrowed(void* ptr) { return {ptr, c10::Device(c10::kCPU)}; }

// The same memory under another device name. Memory that is not the pool's stays owned by its first DataPtr.
c10::DataPtr renamed(c10::DataPtr&& ptr, c10::Device device) {
  void* data = ptr.get();
  if (!data) return {nullptr, device};
  c10::DeleterFnPtr deleter = ptr.get_deleter();
  if (block_of(ptr)) {
    void* context = ptr.release_context();
    return {data, context, deleter, device};
  }
  auto* holder = new c10::DataPtr(std::move(ptr));
  return {data, holder, [](void* h) { delete static_cast<c10::DataPtr*>(h); }, device};
}

void release_host(void* storage) { delete static_cast<c10::Storage*>(storage); }

std::mutex& refresh_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

c10::intrusive_ptr<c10::StorageImpl> borrow(const c10::StorageImpl& storage, void* data) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), borrowed(data),
                                               c10::GetAllocator(c10::kCPU), storage.resizable());
}

}  // namespace

void NeuronStorage::set_twin(c10::intrusive_ptr<c10::StorageImpl> twin) {
  twin_ = std::move(twin);
  published_.store(twin_.get(), std::memory_order_release);
}

void NeuronStorage::release_resources() {
  // Memory taken over from a CPU storage that is still held goes back to it: a kernel may return a tensor that it
  // keeps. A graph under capture holds twins too, but its pool keeps the memory.
  if (C10_UNLIKELY(twin_ && twin_.use_count() > 1 && twin_->data() == data() && !current_capture()))
    twin_->set_data_ptr_noswap(renamed(set_data_ptr({}), c10::Device(c10::kCPU)));
  set_twin({});
  c10::StorageImpl::release_resources();
}

c10::intrusive_ptr<c10::StorageImpl> make_storage(size_t bytes, c10::DeviceIndex index) {
  return c10::make_intrusive<NeuronStorage>(c10::StorageImpl::use_byte_size_t(), bytes,
                                            allocate_on(index, bytes, c10::Device(kNeuron, index)), device_allocator(),
                                            true);
}

c10::intrusive_ptr<c10::StorageImpl> twin_of(c10::StorageImpl& storage) {
  void* data = storage._mutable_data_ptr_no_checks().get();
  auto* neuron = dynamic_cast<NeuronStorage*>(&storage);
  if (!neuron) return borrow(storage, data);
  c10::StorageImpl* twin = neuron->published_.load(std::memory_order_acquire);
  if (C10_LIKELY(twin && twin->data() == data && twin->nbytes() == storage.nbytes()))
    return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(twin);
  std::lock_guard lock(refresh_mutex());
  if (!neuron->twin_) {
    neuron->set_twin(borrow(storage, data));
  } else {
    neuron->twin_->set_data_ptr_noswap(borrowed(data));
    neuron->twin_->set_nbytes(storage.nbytes());
  }
  return neuron->twin_;
}

bool has_twin(const c10::StorageImpl& storage) { return typeid(storage) == typeid(NeuronStorage); }

void sync_from_twin(c10::StorageImpl& storage, c10::StorageImpl& twin) {
  c10::DataPtr& data = twin._mutable_data_ptr_no_checks();
  void* raw = data.get();
  if (raw != storage._mutable_data_ptr_no_checks().get()) {
    storage.set_data_ptr_noswap(renamed(std::move(data), storage.device()));
    twin.set_data_ptr_noswap(borrowed(raw));
  }
  if (twin.nbytes() != storage.nbytes()) storage.set_nbytes(twin.nbytes());
}

c10::DataPtr borrow_host(c10::Storage host, c10::DeviceIndex index) {
  void* data = host.mutable_data();
  return {data, new c10::Storage(std::move(host)), &release_host, c10::Device(kNeuron, index)};
}

const c10::Storage* host_owner(const c10::StorageImpl& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  return data.get_deleter() == &release_host ? static_cast<c10::Storage*>(data.get_context()) : nullptr;
}

c10::intrusive_ptr<c10::StorageImpl> adopt_host_storage(c10::StorageImpl& host, c10::DeviceIndex index) {
  c10::DataPtr& data = host._mutable_data_ptr_no_checks();
  void* raw = data.get();
  auto storage = c10::make_intrusive<NeuronStorage>(c10::StorageImpl::use_byte_size_t(), host.nbytes(),
                                                    renamed(std::move(data), c10::Device(kNeuron, index)),
                                                    device_allocator(), host.resizable());
  host.set_data_ptr_noswap(borrowed(raw));
  storage->set_twin(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&host));
  return storage;
}

}  // namespace neuron
