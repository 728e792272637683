#include "device.h"

#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <mutex>

namespace neuron {

namespace {

constexpr int kMaxDevices = 128;

std::atomic<bool> g_initialized{false};
std::atomic<bool> g_bad_fork{false};
std::array<std::atomic<DeviceState*>, kMaxDevices> g_devices{};  // leaked: tensors may outlive static destructors

thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<int16_t, kMaxDevices> t_streams{};

void after_fork_in_child() {
  if (g_initialized) g_bad_fork = true;
}

thread_local bool t_prepared = false;

// Backward runs where it is called, not on autograd's device thread: operators run on the host's cores here, and a
// second thread that opens an OpenMP team halves the speed of both. Users can turn it back on with
// torch.autograd.set_multithreading_enabled(True).
void prepare_thread() {
  t_prepared = true;
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

[[noreturn]] void no_such_device(int index) {
  TORCH_CHECK(false, "neuron device index ", index, " does not exist: this process has ", device_count(),
              " neuron device(s), neuron:0",
              device_count() > 1 ? " to neuron:" + std::to_string(device_count() - 1) : "",
              ". Set NEURON_RT_NUM_CORES before torch is imported to have more.");
}

}  // namespace

Settings& settings() {
  static Settings s;
  return s;
}

int device_count() { return settings().device_count; }
bool initialized() { return g_initialized; }
bool in_bad_fork() { return g_bad_fork; }

DeviceState& device_state(c10::DeviceIndex index) {
  if (index < 0 || index >= device_count()) no_such_device(index);
  TORCH_CHECK(!g_bad_fork,
              "Cannot use the neuron device in a forked subprocess: it was already used before the fork. "
              "Use the 'spawn' or 'forkserver' start method of torch.multiprocessing.");
  if (C10_UNLIKELY(!t_prepared)) prepare_thread();
  DeviceState* state = g_devices[index].load(std::memory_order_acquire);
  if (state) return *state;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!g_devices[index]) {
    if (!g_initialized.exchange(true)) pthread_atfork(nullptr, nullptr, after_fork_in_child);
    g_devices[index].store(new DeviceState(settings().capacity), std::memory_order_release);
  }
  return *g_devices[index];
}

c10::DeviceIndex current_device() { return t_device; }

void set_current_device(c10::DeviceIndex index) {
  if (index < 0 || index >= device_count()) no_such_device(index);
  t_device = index;
}

c10::DeviceIndex resolve_device(c10::DeviceIndex index) {
  if (index == -1) return t_device;
  if (index < 0 || index >= device_count()) no_such_device(index);
  return index;
}

namespace {
c10::Stream make_stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNeuron, index), id);
}
}  // namespace

c10::Stream current_stream(c10::DeviceIndex index) {
  index = resolve_device(index);
  return make_stream(index, t_streams[index]);
}

c10::Stream default_stream(c10::DeviceIndex index) { return make_stream(resolve_device(index), 0); }

c10::Stream new_stream(c10::DeviceIndex index) {
  index = resolve_device(index);
  uint32_t n = device_state(index).next_stream.fetch_add(1);
  return make_stream(index, 1 + n % (DeviceState::kUserStreams - 1));
}

c10::Stream idle_stream(c10::DeviceIndex index) { return make_stream(resolve_device(index), DeviceState::kIdleStream); }

c10::Stream group_stream(c10::DeviceIndex index, uint32_t group) {
  return make_stream(resolve_device(index), DeviceState::kIdleStream + 1 + group % DeviceState::kGroupStreams);
}

c10::Stream exchange_stream(c10::Stream stream) {
  c10::DeviceIndex index = resolve_device(stream.device_index());
  queue_of(stream);  // throws if there is no such stream
  if (t_streams[index] != stream.id()) current_queue(index).settle();
  return borrow_stream(stream);
}

c10::Stream borrow_stream(c10::Stream stream) {
  c10::DeviceIndex index = resolve_device(stream.device_index());
  c10::Stream old = current_stream(index);
  t_streams[index] = static_cast<int16_t>(stream.id());
  return old;
}

StreamQueue& queue_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.id() >= 0 && stream.id() < DeviceState::kStreams, "neuron stream ", stream.id(),
              " does not exist: make streams with torch.neuron.Stream() or torch.Stream('neuron').");
  return device_state(stream.device_index()).streams[stream.id()];
}

StreamQueue& current_queue(c10::DeviceIndex index) { return device_state(index).streams[t_streams[index]]; }

void synchronize_device(c10::DeviceIndex index) {
  index = resolve_device(index);
  if (!g_devices[index].load(std::memory_order_acquire)) return;
  for (auto& queue : device_state(index).streams) queue.drain();
}

void settle_devices() {
  for (auto& slot : g_devices) {
    DeviceState* state = slot.load(std::memory_order_acquire);
    if (!state) continue;
    for (auto& queue : state->streams) {
      queue.settle();
      queue.await(queue.enqueued());
      queue.release_finished();
    }
  }
}

void shutdown() {
  if (g_bad_fork) return;
  struct StopWorker {
    ~StopWorker() { stop_worker(); }
  } at_the_end;
  for (int i = 0; i < device_count(); i++) synchronize_device(i);
}

}  // namespace neuron
