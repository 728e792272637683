// A run of fusible operators, and views between them, as fused programs with known liveness.
//
// The first run with inputs of some geometry records the operators as eager code does, through the same kernels, and
// takes what was recorded. What is kept of it (a recording) has the programs and where everything lies: which storages
// are inputs, which are results that somebody reads, where temporaries lie in one arena. Later runs with inputs of the
// same geometry look at no operator: they allocate the results and run the programs. So there is one statement of what
// fuses and how, the recorder's, and compiled code has eager code's bits.
//
// Geometry is sizes, strides, offsets, and which inputs share a storage: whatever a recording depends on. Numbers that
// the graph takes as constants are part of it; those of tensors on the host (bias corrections of an optimizer) come
// with each run, unless the recorder did more with one than to hand it on to the program. What the host reads in a
// tensor (labels of a loss) it reads again in each run.
//
// Whether an operator is fusible depends on its tensors (a sum over dims in the middle is not). One that was seen to
// run at once stands by itself from then on, and the operators around it are recorded as two segments.
#pragma once

#include <memory>
#include <mutex>
#include <set>

#include "fusion/window.h"
#include "step.h"

namespace neuron {

class FusedStep final : public Step {
 public:
  FusedStep(c10::DeviceIndex index, std::vector<std::unique_ptr<OperatorStep>> steps);
  ~FusedStep() override;
  void run(Frame& frame) const override;

 private:
  class Segment;
  using Segments = std::vector<std::shared_ptr<Segment>>;
  Segments cut() const;

  c10::DeviceIndex index_;
  std::vector<std::unique_ptr<OperatorStep>> steps_;
  mutable std::mutex mutex_;
  mutable std::set<size_t> alone_;  // steps that are not fusible with the tensors that they get
  mutable std::shared_ptr<const Segments> segments_;
};

}  // namespace neuron
