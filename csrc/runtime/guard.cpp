// c10's device guard: current device, streams and events of neuron, for code that knows only c10.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "device.h"

namespace neuron {

namespace {

struct TimedEvent {
  Event event;
  bool timing;
};

TimedEvent& timed(void* event) { return *static_cast<TimedEvent*>(event); }

struct NeuronGuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNeuron;

  c10::DeviceType type() const override { return kNeuron; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device old = getDevice();
    if (d.index() != old.index()) set_current_device(resolve_device(d.index()));
    return old;
  }
  c10::Device getDevice() const override { return {kNeuron, current_device()}; }
  void setDevice(c10::Device d) const override { set_current_device(resolve_device(d.index())); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < neuron::device_count()) set_current_device(d.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device d) const override { return current_stream(d.index()); }
  c10::Stream getDefaultStream(c10::Device d) const override { return default_stream(d.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return new_stream(d.index()); }
  c10::Stream getNewStream(c10::Device d, int) const override { return new_stream(d.index()); }
  c10::Stream exchangeStream(c10::Stream s) const override { return exchange_stream(s); }
  void* getStreamNativeHandle(const c10::Stream s) const override { return &queue_of(s); }
  bool queryStream(const c10::Stream& s) const override {
    StreamQueue& queue = queue_of(s);
    queue.settle();
    queue.kick();
    return queue.idle();
  }
  void synchronizeStream(const c10::Stream& s) const override { queue_of(s).drain(); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize_device(index); }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& s) const override {
    device_allocator()->recordStream(ptr, s);
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex index,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(index == -1 || index == s.device_index(), "A neuron event of device ", static_cast<int>(index),
                " cannot be recorded on a stream of device ", static_cast<int>(s.device_index()), ".");
    if (!*event) *event = new TimedEvent{{}, flag == c10::EventFlag::BACKEND_DEFAULT};
    timed(*event).event.record(queue_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) timed(event).event.block(queue_of(s));
  }
  bool queryEvent(void* event) const override { return !event || timed(event).event.query(); }
  void synchronizeEvent(void* event) const override {
    if (event) timed(event).event.synchronize();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<TimedEvent*>(event);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    TORCH_CHECK(a && b, "Both events must be recorded before elapsed_time() is called.");
    TORCH_CHECK(timed(a).timing && timed(b).timing,
                "Both events must be made with enable_timing=True before elapsed_time() is called.");
    TORCH_CHECK(timed(a).event.query() && timed(b).event.query(),
                "Both events must be completed before elapsed_time() is called: synchronize the later one.");
    return static_cast<double>(timed(b).event.time_ns() - timed(a).event.time_ns()) / 1e6;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, NeuronGuardImpl)

}  // namespace neuron
