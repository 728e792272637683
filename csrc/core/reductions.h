// The reductions among the lane operations: what combines two lanes, and what a lane starts with.
#pragma once
#include <cstdint>

#include "lane_ops.h"

namespace neuron {

struct Reduction {
  LaneOp op, combine;
  uint32_t identity;  // bits
};
inline constexpr Reduction kReductions[] = {{LaneOp::sum, LaneOp::add, 0},
                                            {LaneOp::amax, LaneOp::maximum, 0xff800000},
                                            {LaneOp::amin, LaneOp::minimum, 0x7f800000},
                                            {LaneOp::iamax, LaneOp::imaximum, 0x80000000},
                                            {LaneOp::iamin, LaneOp::iminimum, 0x7fffffff}};
constexpr const Reduction& reduction(LaneOp op) {
  return kReductions[static_cast<int>(op) - static_cast<int>(LaneOp::sum)];
}
static_assert(reduction(LaneOp::iamin).op == LaneOp::iamin);

}  // namespace neuron
