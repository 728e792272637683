// A step that launches an NKI kernel: traced once per signature (by Python), then run from here.
#pragma once

#include <map>
#include <mutex>

#include "kernel_launch.h"
#include "step.h"

namespace neuron {

// A kernel traced for one signature, its memory and its results.
struct KernelLaunch {
  struct Result {
    size_t buffer;
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
  };
  std::vector<LaunchedCore> cores;
  std::vector<std::pair<int64_t, bool>> buffers;  // bytes, whether they are 0 at first
  std::vector<Result> results;
  std::shared_ptr<void> keep;  // what the pointers point into
};

class KernelStep final : public Step {
 public:
  // The launch for these tensors, made by Python; null: the operator must run instead.
  using Resolve = std::function<std::shared_ptr<const KernelLaunch>(const std::vector<at::Tensor>&)>;
  // tensors: the operands. by_operator: the same call through the dispatcher, for what has no launch.
  KernelStep(std::string name, c10::DeviceIndex index, std::vector<Operand> tensors, Resolve resolve,
             std::unique_ptr<OperatorStep> by_operator);
  void run(Frame& frame) const override;

 private:
  std::shared_ptr<const KernelLaunch> find(const std::vector<at::Tensor>& tensors) const;
  std::string name_;
  c10::DeviceIndex index_;
  std::vector<Operand> tensors_;
  Resolve resolve_;
  std::unique_ptr<OperatorStep> by_operator_;
  mutable std::mutex mutex_;
  mutable std::map<std::vector<int64_t>, std::shared_ptr<const KernelLaunch>> launches_;  // by signature
};

}  // namespace neuron
