// c10d::Work of the neuron backend.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "group.h"

namespace neuron {

// What a running operation and its Work share.
struct WorkState {
  std::vector<at::Tensor> kept;                           // alive until the operation is done
  std::vector<at::Tensor> outputs;                        // result() of the Work and value of its future
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to (host), from: results of outputs that are not contiguous
  std::shared_ptr<int> source;                            // sender of a received message
  std::vector<c10::Device> devices;
  uint64_t number = 0;

  std::mutex mutex;
  bool complete = false;
  std::exception_ptr error;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  // Called by the engine when the operation has ended.
  void finish(std::exception_ptr failure);
};

class WorkNeuron final : public c10d::Work {
 public:
  WorkNeuron(int rank, c10d::OpType type, std::shared_ptr<collectives::GroupOp> op, std::shared_ptr<WorkState> state);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return state_->outputs; }
  // Blocks the host, whatever its stream.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return state_->number; }

 private:
  std::shared_ptr<collectives::GroupOp> op_;
  std::shared_ptr<WorkState> state_;
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
