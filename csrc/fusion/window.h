// The window of a stream: fusible operators that were called and have not run. Recording costs about what a CPU
// dispatch costs; closing the window turns what it holds into programs (cache.h) and runs them in the closing thread.
//
// It closes when anybody drains the stream or queues work on it (every library operator, host read, copy, event,
// switch of streams, collective and export does), when another thread records, and at the caps of limits.h.
#pragma once

#include <c10/core/StorageImpl.h>

#include <memory>
#include <mutex>
#include <vector>

#include "fuser.h"
#include "limits.h"
#include "runtime/device.h"

namespace neuron {
class Capture;
}

namespace neuron::fusion {

// A storage that the window's nodes use. Those that a node writes whole before anybody reads them are held weakly: if
// the last tensor goes, their memory goes back at once, because nobody will read what was to be written there.
struct Held {
  c10::intrusive_ptr<c10::StorageImpl> strong;
  c10::weak_intrusive_ptr<c10::StorageImpl> weak;
  char* memory;
  size_t bytes;
};

class Window final : public Deferred {
 public:
  Window(c10::DeviceIndex device, StreamQueue& queue) : device_(device), queue_(queue) {}

  // Of the caller's current stream.
  static Window& current(c10::DeviceIndex device);

  // Recording, with the lock held:
  //   Recording r(window);  node.in[i] = r.operand(...);  ...  r.append(node, scalars);  r.finish();
  class Recording {
   public:
    explicit Recording(Window& window);
    // Number of a storage in this window. `overwritten`: the node writes all of it.
    uint16_t storage(c10::StorageImpl& impl, bool overwritten);
    uint16_t operand(std::span<const Place> members) { return graph_->intern(members); }
    uint16_t space(std::span<const int64_t> counts) { return graph_->intern_space(counts); }
    void append(const Node& node, std::span<const uint32_t> scalars);
    // The end of a call: closes the window if it is full, or if nothing may be pending.
    void finish();

   private:
    Window& window_;
    std::unique_lock<std::mutex> lock_;
    Graph* graph_;
    bool full_ = false;
  };

  void flush() override;
  // Afterwards the host may read this storage: waits for the stream, and runs what is pending if it writes there.
  void settle(const c10::StorageImpl& storage);

 private:
  struct Batch {
    Graph graph;
    std::vector<Held> held;
    size_t bytes = 0;  // of storages held strongly
    size_t next_look = kMaxOrphanBytes;
    Capture* capture = nullptr;  // of the thread that recorded
    bool keeps_too_much();
    void clear();
  };
  void run(Batch& batch);
  // Runs a batch of a thread that captures a graph, as a step of the graph.
  static void capture(const Batch& batch, std::shared_ptr<const Plan> plan, std::vector<char*> memory,
                      std::vector<c10::DataPtr> temporaries);

  const c10::DeviceIndex device_;
  StreamQueue& queue_;
  std::mutex recording_, running_;
  Batch open_, closed_;
  std::vector<std::pair<c10::StorageImpl*, uint16_t>> index_;  // open addressing; of open_.held
  const void* thread_ = nullptr;                               // who records
};

}  // namespace neuron::fusion
