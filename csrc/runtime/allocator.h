// The device's c10 allocator, and the redirection of CPU allocations inside library operators to the device's pool.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "device.h"

namespace neuron {

c10::DeviceAllocator* device_allocator();

// `bytes` of the memory pool of device `index`, as a DataPtr that says it lives on `as`.
c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes, c10::Device as);

// The pool block behind a DataPtr of ours; null for memory that is not the pool's.
Block* block_of(const c10::DataPtr& ptr);

// While one is alive, this thread's CPU allocations come from the pool of device `index`: outputs and temporaries of
// a library operator are device memory, and reuse warm pages.
class HostAllocationScope {
 public:
  explicit HostAllocationScope(c10::DeviceIndex index);
  ~HostAllocationScope();
  HostAllocationScope(const HostAllocationScope&) = delete;
  HostAllocationScope& operator=(const HostAllocationScope&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// Addresses that a library operator was given, in order; and the same again for a later run of that operator.
struct AllocationTrace {
  struct Entry {
    char* address;
    size_t bytes;
  };
  std::vector<Entry> entries;
};
class AllocationRecording {
 public:
  explicit AllocationRecording(AllocationTrace& trace);
  ~AllocationRecording();
};
class AllocationReplay {
 public:
  explicit AllocationReplay(const AllocationTrace& trace);
  ~AllocationReplay();
};

// Who owns what this thread allocates on device `index`: its current stream, or `pool` while a graph is captured.
uint64_t allocation_owner(c10::DeviceIndex index);
void set_capture_owner(uint64_t owner);  // 0: none

void register_allocators();

}  // namespace neuron
