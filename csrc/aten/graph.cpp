#include "graph.h"

#include <ATen/core/GraphImplInterface.h>

#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "library.h"
#include "runtime/generator.h"

namespace neuron {

namespace {

thread_local Capture* t_capture = nullptr;
std::mutex g_mutex;
std::map<uint64_t, int> g_pool_users;                         // private pools and how many graphs use each
std::set<std::pair<c10::DeviceIndex, c10::StreamId>> g_busy;  // streams under capture
uint64_t g_next_pool = 1;

struct LibraryStep {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;
  int generator_slot;
  std::optional<at::Generator> generator;
  c10::DeviceIndex index;
  AllocationTrace allocations;
  std::vector<c10::IValue> outputs;

  void run() {
    torch::jit::Stack stack = arguments;
    if (generator_slot >= 0) stack[generator_slot] = derived_host_generator(generator, index);
    {
      KernelScope scope(index);
      AllocationReplay replay(allocations);
      op.callBoxed(&stack);
    }
    for (size_t i = 0; i < outputs.size(); i++) settle(outputs[i], stack[i]);
  }

  // The results must be where the capture put them; a kernel that allocated otherwise this time is corrected.
  static void settle(const c10::IValue& expected, const c10::IValue& got) {
    auto one = [](const at::Tensor& to, const at::Tensor& from) {
      if (!to.defined() || !from.defined() || to.layout() != c10::kStrided ||
          to.const_data_ptr() == from.const_data_ptr())
        return;
      to.copy_(from);
    };
    if (expected.isTensor() && got.isTensor()) one(expected.toTensor(), got.toTensor());
    if (expected.isTensorList() && got.isTensorList())
      for (size_t i = 0; i < expected.toTensorList().size(); i++)
        one(expected.toTensorList().get(i), got.toTensorList().get(i));
  }
};

class Graph final : public at::GraphImplInterface, public Capture {
 public:
  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override {
    if (t_capture == this) end();
    reset();
  }

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(!t_capture, "This thread is capturing a neuron graph already; captures do not nest.");
    TORCH_CHECK(steps_.empty(), "This graph holds a capture already: call reset() first.");
    device_ = current_device();
    stream_ = current_stream(device_).id();
    synchronize_device(device_);
    std::lock_guard lock(g_mutex);
    pool_ = pool.first ? pool.first : g_next_pool++;
    g_pool_users[pool_]++;
    g_busy.insert({device_, stream_});
    set_capture_owner(kPrivateOwner | pool_);
    t_capture = this;
    held_pool_ = true;
  }

  void capture_end() override {
    TORCH_CHECK(t_capture == this, "capture_end() must be called by the thread that called capture_begin().");
    current_queue(device_).drain();  // what is recorded but has not run belongs to the graph
    end();
  }

  void instantiate() override {}

  void replay() override {
    TORCH_CHECK(t_capture != this, "The graph is still being captured: call capture_end() before replay().");
    TORCH_CHECK(held_pool_, "This graph holds no capture: record one before replay().");
    TORCH_CHECK(!t_capture, "A graph cannot be replayed while this thread captures another.");
    current_queue(device_).drain();
    for (auto& step : steps_) step.work();
  }

  void reset() override {
    steps_.clear();
    held_.clear();
    if (!std::exchange(held_pool_, false)) return;
    std::lock_guard lock(g_mutex);
    if (--g_pool_users[pool_] == 0) {
      g_pool_users.erase(pool_);
      device_state(device_).pool.retire_owner(kPrivateOwner | pool_, stream_);
    }
  }

  at::MempoolId_t pool() const override { return {pool_, 0}; }
  void enable_debug_mode() override { debug_ = true; }
  void debug_dump(const std::string& path) override {
    TORCH_CHECK(debug_, "Call enable_debug_mode() before debug_dump().");
    std::ofstream out(path);
    TORCH_CHECK(out, "Cannot write the graph to ", path);
    out << "neuron graph, device " << static_cast<int>(device_) << ", " << steps_.size() << " steps\n";
    for (auto& step : steps_) out << step.name << "\n";
  }

  void call(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t arguments, size_t returns,
            int generator_slot, const std::optional<at::Generator>& generator, c10::DeviceIndex index) override {
    TORCH_CHECK(!op.hasTag(at::Tag::data_dependent_output) && !op.hasTag(at::Tag::dynamic_output_shape),
                toString(op.operator_name()),
                " has a result that depends on data: it cannot be part of a captured neuron graph.");
    auto step = std::make_shared<LibraryStep>(
        LibraryStep{op, {stack->end() - arguments, stack->end()}, generator_slot, generator, index, {}, {}});
    if (generator_slot >= 0) {
      remember_generator(generator, index);
      (*stack)[stack->size() - arguments + generator_slot] = derived_host_generator(generator, index);
    }
    {
      AllocationRecording recording(step->allocations);
      op.callBoxed(stack);
    }
    step->outputs.assign(stack->end() - returns, stack->end());
    steps_.push_back({toString(op.operator_name()), [step] { step->run(); }});
  }

  void step(std::string name, std::function<void()> work) override {
    work();
    steps_.push_back({std::move(name), std::move(work)});
  }

  void touch(const at::Tensor& tensor, bool written) override {
    if (is_neuron(tensor) && tensor.layout() == c10::kStrided && !tensor.is_nested()) touch(tensor.storage(), written);
  }

  void touch(const c10::Storage& storage, bool written) override {
    Block* block = block_of(storage.data_ptr());
    if (block && block->owner == (kPrivateOwner | pool_)) return;
    held_.insert(storage);
    if (!written || saved_.count(storage.unsafeGetStorageImpl())) return;
    auto* bytes = static_cast<const char*>(storage.data());
    saved_.emplace(storage.unsafeGetStorageImpl(), std::vector<char>(bytes, bytes + storage.nbytes()));
  }

  void remember_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex index) override {
    NeuronGenerator& g = generator_or_default(generator, index);
    offsets_.emplace(&g, g.get_offset());
  }

 private:
  struct Step {
    std::string name;
    std::function<void()> work;
  };
  struct ByImpl {
    bool operator()(const c10::Storage& a, const c10::Storage& b) const {
      return a.unsafeGetStorageImpl() < b.unsafeGetStorageImpl();
    }
  };

  void end() {
    t_capture = nullptr;
    set_capture_owner(0);
    for (auto& [impl, bytes] : saved_)
      if (impl->nbytes() == bytes.size()) std::memcpy(impl->mutable_data(), bytes.data(), bytes.size());
    for (auto& [generator, offset] : offsets_) generator->set_offset(offset);
    saved_.clear();
    offsets_.clear();
    std::lock_guard lock(g_mutex);
    g_busy.erase({device_, stream_});
  }

  c10::DeviceIndex device_ = 0;
  c10::StreamId stream_ = 0;
  uint64_t pool_ = 0;
  bool held_pool_ = false, debug_ = false;
  std::vector<Step> steps_;
  std::set<c10::Storage, ByImpl> held_;  // storages from outside
  std::map<c10::StorageImpl*, std::vector<char>> saved_;
  std::map<NeuronGenerator*, uint64_t> offsets_;
};

}  // namespace

Capture* current_capture() { return t_capture; }

void forbid_in_capture(const char* what) {
  TORCH_CHECK(!t_capture, what,
              " is not possible while a neuron graph is captured: move it out of the captured region.");
}

bool is_capturing(c10::DeviceIndex index, c10::StreamId stream) {
  std::lock_guard lock(g_mutex);
  return g_busy.count({index, stream}) > 0;
}

// The registry's key is the name of the device type at the time of the look-up, after the rename.
void register_graph() {
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kNeuron, /*lower_case=*/false),
                                    [](const at::GraphImplArgs& args) -> std::unique_ptr<at::GraphImplInterface> {
                                      return std::make_unique<Graph>(args);
                                    });
}

}  // namespace neuron
