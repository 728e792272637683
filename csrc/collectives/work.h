// c10d::Work of the neuron backend.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "group.h"

namespace neuron {

// Throws what ends operations of collectives as the exception PyTorch has for it.
[[noreturn]] void throw_as_torch_error(std::exception_ptr error);

// What a running operation and its Work share.
struct WorkState {
  std::vector<at::Tensor> kept;                           // alive until the operation is done
  std::vector<at::Tensor> outputs;                        // result() of the Work and value of its future
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to (host), from: results of outputs that are not contiguous
  std::shared_ptr<int> source;                            // sender of a received message
  std::vector<c10::Device> devices;
  uint64_t number = 0;
  // Number of the group in this process, for collectives: what is done in the order of the calls.
  std::optional<uint32_t> group;

  std::mutex mutex;
  bool complete = false;
  std::exception_ptr error;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  // Called by the engine when the operation has ended; returns what completes the future, if there is one.
  std::function<void()> finish(std::exception_ptr failure);
};

class WorkNeuron final : public c10d::Work {
 public:
  WorkNeuron(int rank, c10d::OpType type, std::shared_ptr<collectives::GroupOp> op, std::shared_ptr<WorkState> state);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;  // waits for the message
  std::vector<at::Tensor> result() override { return state_->outputs; }
  // Makes the current streams of the tensors' devices wait; an error surfaces where the host waits for them. Blocks the
  // host for CPU tensors, with a timeout, and if NEURON_LAUNCH_BLOCKING is set.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  // For collectives of neuron tensors complete at once, as for CUDA: streams wait for its events, and continuations run
  // where and in the order in which they are attached, so that they may call collectives themselves.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return state_->number; }
  // Blocks the host until the operation is done; throws its error.
  void wait_on_host() const;

 private:
  std::shared_ptr<collectives::GroupOp> op_;
  std::shared_ptr<WorkState> state_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // one that completes by events
};

// What was done at the call.
class WorkDone final : public c10d::Work {
 public:
  WorkDone(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
      : Work(rank, type), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<at::Tensor> outputs_;
};

// Several works as one.
class WorkBatch final : public c10d::Work {
 public:
  WorkBatch(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace neuron
