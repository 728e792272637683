// Device-side events for torch.profiler: what ran on which stream, from when to when.
#pragma once

#include <atomic>
#include <string>

#include "device.h"

namespace neuron {

extern std::atomic<bool> profiling;

void record_activity(const std::string& name, c10::DeviceIndex device, int64_t start_ns);
int64_t profiler_time_ns();

// For the length of an operator: records one device event if a profiler listens.
class DeviceActivity {
 public:
  DeviceActivity(const std::string& name, c10::DeviceIndex device)
      : name_(name), device_(device), start_(profiling.load(std::memory_order_relaxed) ? profiler_time_ns() : 0) {}
  ~DeviceActivity() {
    if (C10_UNLIKELY(start_)) record_activity(name_, device_, start_);
  }
  DeviceActivity(const DeviceActivity&) = delete;
  DeviceActivity& operator=(const DeviceActivity&) = delete;

 private:
  const std::string& name_;
  c10::DeviceIndex device_;
  int64_t start_;
};

void register_profiler();

}  // namespace neuron
