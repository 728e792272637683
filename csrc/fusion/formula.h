// Rows as formulas: arithmetic operators on lanes.
#pragma once

#include "rows.h"

namespace neuron::fusion {

struct V {
  Lowering* l;
  Lanes v;
  operator Lanes() const { return v; }
};
inline V operator+(V a, V b) { return {a.l, a.l->op(LaneOp::add, a, b)}; }
inline V operator-(V a, V b) { return {a.l, a.l->op(LaneOp::sub, a, b)}; }
inline V operator*(V a, V b) { return {a.l, a.l->op(LaneOp::mul, a, b)}; }
inline V operator/(V a, V b) { return {a.l, a.l->op(LaneOp::div, a, b)}; }
inline V operator>(V a, V b) { return {a.l, a.l->op(LaneOp::gt, a, b)}; }
inline V operator<(V a, V b) { return {a.l, a.l->op(LaneOp::lt, a, b)}; }
inline V operator<=(V a, V b) { return {a.l, a.l->op(LaneOp::le, a, b)}; }
inline V operator>=(V a, V b) { return {a.l, a.l->op(LaneOp::ge, a, b)}; }
inline V operator|(V a, V b) { return {a.l, a.l->op(LaneOp::ior, a, b)}; }
inline V operator&(V a, V b) { return {a.l, a.l->op(LaneOp::iand, a, b)}; }
inline V f(LaneOp op, V a) { return {a.l, a.l->op(op, a)}; }
inline V f(LaneOp op, V a, V b) { return {a.l, a.l->op(op, a, b)}; }
inline V where(V condition, V a, V b) { return {a.l, a.l->op(LaneOp::select, condition, a, b)}; }

// One node's inputs, numbers and results as formulas speak of them.
struct Formula {
  Lowering& l;
  V in(int i) const { return {&l, l.in(i)}; }
  V number(int i) const { return {&l, l.scalar(i)}; }
  V c(float value) const { return {&l, l.constant(value)}; }
  V reduce(LaneOp op, V v) const { return {&l, l.reduce(op, v)}; }
  V accumulate(LaneOp op, V v) const { return {&l, l.accumulate(op, v)}; }
  void out(int i, V v) const { l.out(i, v); }
};

}  // namespace neuron::fusion
