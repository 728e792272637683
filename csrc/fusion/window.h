// The window of a stream: fusible operators that were called and have not run. Recording costs about what a CPU
// dispatch costs; closing the window turns what it holds into programs (cache.h) and runs them in the closing thread.
//
// It closes when anybody drains the stream or queues work on it (every library operator, host read, copy, event,
// switch of streams, collective and export does), when another thread records, and at the caps of limits.h.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "fuser.h"
#include "limits.h"
#include "observer.h"
#include "runtime/device.h"

namespace neuron {
class Capture;
class NeuronGenerator;
}  // namespace neuron

namespace neuron::fusion {

// A storage that the window's nodes use. Those that a node writes whole before anybody reads them are held weakly: if
// the last tensor goes, their memory goes back at once, because nobody will read what was to be written there.
struct Held {
  c10::intrusive_ptr<c10::StorageImpl> strong;
  c10::weak_intrusive_ptr<c10::StorageImpl> weak;
  char* memory;
  size_t bytes;
};

// Reads again what the host read when a call was recorded (labels of a loss), in memory that starts at `from`; fills
// storages, and scalars of a node, that follow from it.
using LookAgain = std::function<void(const char* from, std::span<char* const> filled, uint32_t* scalars)>;

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
    // The last node depends on what the host read in `from`, by way of these storages and the node's scalars.
    void looked(const c10::StorageImpl& from, std::initializer_list<const at::TensorBase*> filled, LookAgain again);
    // The last node's scalar `i` is what a tensor on the host holds.
    void hosted(size_t i, const at::TensorBase& from);
    // The last node's first four scalars are seed and offset of counters that were reserved of a generator.
    void draws(NeuronGenerator& generator, uint64_t counters);
    // The end of a call: closes the window if it is full, or if nothing may be pending.
    void finish();

   private:
    Window& window_;
    const uint32_t call_;  // the observer's number; asked for before the lock is taken
    std::unique_lock<std::mutex> lock_;
    Graph* graph_;
    std::optional<Closed> full_;
  };

  void flush() override { close(Closed::drained); }
  // Afterwards the host may read this storage: waits for the stream, and runs what is pending if it writes there.
  void settle(const c10::StorageImpl& storage);

  // A node whose seed and offset a captured graph takes anew at each replay.
  struct Draw {
    size_t node;
    c10::intrusive_ptr<c10::GeneratorImpl> generator;
    uint64_t counters;
  };
  // A scalar of the graph that a tensor on the host held. The tensor may be gone; who made sure that it is not can tell
  // it by its address.
  struct Hosted {
    uint32_t scalar;
    Dtype compute;  // in which its node took it
    const c10::TensorImpl* from;
  };
  struct Look {
    const c10::StorageImpl* from;
    std::vector<uint16_t> filled;  // numbers of storages
    uint32_t scalars;              // the first
    LookAgain again;
  };
  // What was recorded and not run.
  struct Batch {
    Graph graph;
    std::vector<Held> held;       // by storage number
    std::vector<uint32_t> calls;  // the observer's numbers of the nodes; may be shorter
    std::vector<Hosted> hosted;
    std::vector<Look> looks;
    size_t bytes = 0;  // of storages held strongly
    size_t next_look = kMaxOrphanBytes;
    Capture* capture = nullptr;  // of the thread that recorded
    std::vector<Draw> draws;     // while it captures
    bool keeps_too_much();
    void clear();
  };
  // Gives away what this thread recorded since the window was closed for the `closed`th time, instead of running it:
  // the caller runs it. False, and nothing is given, if the window was closed again, or holds nothing.
  bool take(uint64_t closed, Batch& batch);
  // What is pending now, and which storages somebody holds; for measurements.
  std::pair<Graph, std::vector<uint8_t>> pending();
  uint64_t times_closed() const { return times_closed_.load(std::memory_order_acquire); }

 private:
  void close(Closed why);
  // Returns what an observer is to know.
  std::vector<ProgramFacts> run(Batch& batch);
  void swap_out(Batch& batch);
  // Runs a batch of a thread that captures a graph, as a step of the graph.
  static void capture(const Batch& batch, std::shared_ptr<const Plan> plan, std::vector<char*> memory,
                      std::vector<c10::DataPtr> temporaries);

  const c10::DeviceIndex device_;
  StreamQueue& queue_;
  std::mutex recording_, running_;
  Batch open_, closed_;
  std::vector<std::pair<c10::StorageImpl*, uint16_t>> index_;  // open addressing; of open_.held
  const void* thread_ = nullptr;                               // who records
  std::atomic<uint64_t> times_closed_{0};
};

// A call none of whose results anybody reads, not even the window, was made for its first one: that counts as live, so
// that a call whose result is dropped and the same call whose result is kept are one program. Returns those storages,
// which need memory for as long as the plan runs.
std::vector<uint16_t> keep_idle_results(const Graph& graph, std::vector<uint8_t>& live);

// Runs a plan (fuser.h) in the calling thread, counted, logged and seen by the profiler.
// `scalars`: those of the graph, or others in their places.
void run_plan(const Plan& plan, const Graph& graph, std::span<const uint32_t> scalars, std::span<char* const> memory,
              c10::DeviceIndex device);

}  // namespace neuron::fusion
