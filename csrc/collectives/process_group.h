// ProcessGroupNeuron: the c10d backend "neuron", for neuron and CPU tensors.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace neuron {

namespace collectives {
class Group;
enum class Kind : uint8_t;
}  // namespace collectives

class ProcessGroupNeuron final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct NeuronOptions final : Options {  // which Python can copy
    explicit NeuronOptions(std::chrono::milliseconds timeout) : Options("neuron", timeout) {}
  };

  ProcessGroupNeuron(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout,
                     std::string name, std::vector<uint64_t> global_ranks);
  ~ProcessGroupNeuron() override;

  const std::string getBackendName() const override { return "neuron"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  const c10::intrusive_ptr<NeuronOptions>& options() const { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  bool supportsShrinking() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}  // every group counts from zero
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& options, const int& rank,
                                          const int& size) override;
  // The group without some ranks, which may be dead: only the others call it. Flag 1: abort what is under way first.
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                           const c10::intrusive_ptr<Options>& options) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // Rank 0 names the ranks that do not come: the first, or all of them.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // What each rank of this host is doing or did last.
  std::string flight_report() const;
  // Name of the algorithm that an operation of this size uses.
  std::string algorithm(const std::string& operation, uint64_t bytes) const;
  int splits() const { return splits_; }

 private:
  class Plan;
  WorkPtr launch(Plan plan, c10d::OpType type, std::chrono::milliseconds timeout, bool async);
  c10::intrusive_ptr<c10d::Backend> part(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                         const c10::intrusive_ptr<Options>& options, const char* suffix);
  WorkPtr message(collectives::Kind kind, Tensors& tensors, int peer, int tag, c10d::OpType type);
  int64_t timeout_ns(std::chrono::milliseconds timeout) const;

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<NeuronOptions> options_;
  std::shared_ptr<collectives::Group> group_;
  const uint32_t number_;  // of the group in this process
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  int splits_ = 0;
};

// Called now and then while a host thread waits for an operation; may throw (Ctrl-C).
void set_collective_interrupt_check(std::function<void()> check);
// Ends the threads of collectives; for the end of the process.
void stop_collectives();

}  // namespace neuron
