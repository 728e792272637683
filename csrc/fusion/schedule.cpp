// Rule: order. A node goes into the earliest program that it fits and that none of its dependencies forbids; programs
// run in order, and so do the nodes of one.
//
// A node fits a program if it walks through the same number of elements (for each member of a list), or through the
// rows of a program that reduces. It depends on whoever wrote what it reads, and on whoever read or wrote what it
// writes. Within a program that is possible for the same place alone (rule: overlap), or for a row value that full
// values read back repeated along the columns, as in softmax. Column values are known when a program ends: who reads
// them goes to a later one.
//
// Reason: calls on other shapes in between must not cut a chain, or training loops that interleave layers would never
// fuse.
#include "schedule.h"

#include <algorithm>

#include "rows.h"

namespace neuron::fusion {

namespace {

constexpr int kMaxNodes = 48;  // a program; its values must stay in cache

struct Use {
  uint16_t operand, group;
  bool written;
  Extent extent;
};

class Scheduler {
 public:
  explicit Scheduler(const Graph& g) : g_(g), uses_(g.first_touch.size()) {}

  std::vector<Group> run() {
    for (size_t n = 0; n < g_.nodes.size(); n++) {
      const uint16_t at = choose(g_.nodes[n]);
      groups_[at].nodes.push_back(static_cast<uint16_t>(n));
      note(g_.nodes[n], at);
    }
    return std::move(groups_);
  }

 private:
  // The first group that dependencies allow.
  int earliest(const Node& node) const {
    int first = 0;
    for (int i = 0; i < node.inputs; i++)
      visit(node.in[i], [&](const Use& u) {
        if (!u.written) return;
        if (u.operand == node.in[i])
          first = std::max<int>(first, u.extent == Extent::column ? u.group + 1 : u.group);
        else if (u.operand == g_.operands[node.in[i]].row && u.extent != Extent::column)
          first = std::max<int>(first, repeats_in(u.group, node.in[i]) ? u.group : u.group + 1);
        else if (!g_.apart(u.operand, node.in[i]))
          first = std::max<int>(first, u.group + 1);
      });
    for (int i = 0; i < node.outputs; i++)
      visit(node.out[i], [&](const Use& u) {
        if (u.operand == node.out[i])
          first = std::max<int>(first, u.group);
        else if (!g_.apart(u.operand, node.out[i]))
          first = std::max<int>(first, u.group + 1);
      });
    return first;
  }

  template <class F>
  void visit(uint16_t operand, F f) const {
    for (int m = 0; m < g_.operands[operand].members; m++)
      for (const Use& u : uses_[g_.place(operand, m).storage]) f(u);
  }

  // Whether an operand that repeats along its fastest dim does so along the columns of a group.
  bool repeats_in(int group, uint16_t operand) const {
    const Group& g = groups_[group];
    return g.row_space != kNone && !g.long_rows &&
           g_.operands[operand].repeats * g_.counts[g_.spaces[g.row_space].first] ==
               g_.counts[g_.spaces[g.space].first];
  }

  bool fits(const Group& g, const Node& node) const {
    if (g.nodes.size() >= kMaxNodes) return false;
    if (node.reduces) return g.space == node.space && (g.row_space == kNone || g.row_space == node.row_space);
    return g.space == node.space || g.row_space == node.space;
  }

  // In one group a place has one extent: a row value is not read element by element, nor the other way round.
  bool extents_agree(int at, const Node& node) const {
    if (groups_[at].row_space == kNone && !node.reduces) return true;
    bool good = true;
    auto check = [&](uint16_t operand, int index, bool output) {
      visit(operand, [&](const Use& u) {
        if (u.group == at && u.operand == operand && (u.written || output))
          good &= u.extent == extent_in(groups_[at], node, index, output);
      });
    };
    for (int i = 0; i < node.inputs; i++) check(node.in[i], i, false);
    for (int i = 0; i < node.outputs; i++) check(node.out[i], i, true);
    return good;
  }

  uint16_t choose(const Node& node) {
    for (int at = earliest(node); at < static_cast<int>(groups_.size()); at++)
      if (fits(groups_[at], node) && extents_agree(at, node)) return static_cast<uint16_t>(at);
    groups_.emplace_back();
    groups_.back().space = node.space;
    return static_cast<uint16_t>(groups_.size() - 1);
  }

  void note(const Node& node, uint16_t at) {
    Group& g = groups_[at];
    if (node.reduces) {
      g.row_space = node.row_space;
      g.long_rows = g_.columns(node) > kMaxResidentCols;
    }
    auto put = [&](uint16_t operand, int index, bool written) {
      for (int m = 0; m < g_.operands[operand].members; m++)
        uses_[g_.place(operand, m).storage].push_back({operand, at, written, extent_in(g, node, index, written)});
    };
    for (int i = 0; i < node.inputs; i++) put(node.in[i], i, false);
    for (int i = 0; i < node.outputs; i++) put(node.out[i], i, true);
  }

  const Graph& g_;
  std::vector<Group> groups_;
  std::vector<std::vector<Use>> uses_;  // by storage
};

}  // namespace

Extent extent_in(const Group& group, const Node& node, int index, bool output) {
  if (node.reduces && output && node.row->column_outputs >> index & 1) return Extent::column;
  if (node.reduces)
    return (output ? node.row->row_outputs : node.row->row_inputs) >> index & 1 ? Extent::row : Extent::full;
  return group.row_space != kNone && node.space != group.space ? Extent::row : Extent::full;
}

std::vector<Group> schedule(const Graph& graph) { return Scheduler(graph).run(); }

}  // namespace neuron::fusion
