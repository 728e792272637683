// The process's neuron devices: memory pool, streams and current device of each. Everything else hangs off this file.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>

#include "pool.h"
#include "stream_queue.h"

namespace neuron {

constexpr auto kNeuron = c10::DeviceType::PrivateUse1;

// Settings that Python reads from the environment (torchneuron/env.py documents them) before the first use.
struct Settings {
  int device_count = 1;
  size_t capacity = 0;  // bytes of memory of each device
  bool launch_blocking = false;
  bool strict = false;
  bool fusion = true;
};
Settings& settings();

struct DeviceState {
  explicit DeviceState(size_t capacity) : pool(capacity) {}
  MemoryPool pool;
  // Stream 0 is the default stream, the next 32 are handed out to users in turn, then comes one that nobody queues work
  // on, then those of process groups.
  static constexpr int kUserStreams = 33, kIdleStream = kUserStreams, kGroupStreams = 32;
  static constexpr int kStreams = kIdleStream + 1 + kGroupStreams;
  StreamQueue streams[kStreams];
  std::atomic<uint32_t> next_stream{0};
};

int device_count();
// State of a device. Throws for an index that does not exist, and in a process forked after the first use.
DeviceState& device_state(c10::DeviceIndex index);
// True once a device was used in this process.
bool initialized();
// True in a child that was forked after the first use: devices, like CUDA's, do not survive fork.
bool in_bad_fork();

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
// `index` with -1 replaced by the current device; throws if there is no such device.
c10::DeviceIndex resolve_device(c10::DeviceIndex index);

c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream new_stream(c10::DeviceIndex index);
// The stream of threads that work for all streams: an event recorded on it has passed.
c10::Stream idle_stream(c10::DeviceIndex index);
// The stream that stands for the collectives of the process's n-th group (groups far apart share one).
c10::Stream group_stream(c10::DeviceIndex index, uint32_t group);
c10::Stream exchange_stream(c10::Stream stream);
// The same for a thread that only records events or queues tasks on `stream`, or stops to: its own stream's deferred
// work stays where it is, because this thread may be one that the stream waits for.
c10::Stream borrow_stream(c10::Stream stream);
StreamQueue& queue_of(const c10::Stream& stream);
StreamQueue& current_queue(c10::DeviceIndex index);

void synchronize_device(c10::DeviceIndex index);
// Runs what is queued on every device and frees what it held; errors surface at the next synchronisation.
void settle_devices();
// For the end of the process: drains every device. Ctrl-C drops what is left.
void shutdown();

}  // namespace neuron
