// Rule: order. Each node starts a program of its own, which joins the programs of the nodes that it depends on, one
// after the other, where it may; what is left joins programs of the same shape. Programs run in an order that
// dependencies allow, and so do the nodes of one.
//
// Two programs may join if both walk through the same number of elements (for each member of a list), or one of them
// through the rows that the other one reduces; and if no third program stands between them. A node depends on whoever
// wrote what it reads, and on whoever read or wrote what it writes. Within a program that is possible for the same
// place alone (rule: overlap), or for a row value that full values read back repeated along the columns, as in softmax.
// Column values are known when a program ends: who reads them goes to a later one.
//
// Reason: calls on other shapes in between must not cut a chain, or training loops that interleave layers would never
// fuse. Producers come first because a value that its consumer finds in the tile need not be written.
#include "schedule.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "rows.h"

namespace neuron::fusion {

namespace {

constexpr size_t kMaxNodes = 48;  // a program; its values must stay in cache

// That a node reads or writes an operand.
struct Use {
  uint16_t node;
  bool written;
};

class Scheduler {
 public:
  explicit Scheduler(const Graph& g)
      : g_(g), uses_(g.operands.size()), meeting_(g.operands.size()), before_(g.nodes.size()) {}

  std::vector<Group> run() {
    for (size_t n = 0; n < g_.nodes.size(); n++) {
      const auto id = static_cast<uint16_t>(n);
      add(id);
      for (uint16_t earlier : before_[n]) join(of_[earlier], of_[n]);
    }
    for (uint16_t a = 0; a < groups_.size(); a++)
      for (uint16_t b = a + 1; b < groups_.size(); b++)
        if (!groups_[a].nodes.empty() && !groups_[b].nodes.empty()) join(a, b);
    return in_order();
  }

 private:
  // A group of one node, and whom the node depends on.
  void add(uint16_t id) {
    const Node& node = g_.nodes[id];
    Group& group = groups_.emplace_back();
    group.space = node.space;
    group.nodes = {id};
    if (node.reduces) {
      group.row_space = node.row_space;
      group.long_rows = g_.columns(node) > kMaxResidentCols;
    }
    of_.push_back(id);
    std::vector<uint16_t>& before = before_[id];
    for (int i = 0; i < node.inputs; i++)
      visit(node.in[i], [&](const Use& u) {
        if (u.written) before.push_back(u.node);
      });
    for (int i = 0; i < node.outputs; i++) visit(node.out[i], [&](const Use& u) { before.push_back(u.node); });
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    for (int i = 0; i < node.inputs; i++) uses_[node.in[i]].push_back({id, false});
    for (int i = 0; i < node.outputs; i++) uses_[node.out[i]].push_back({id, true});
  }

  // Who uses the memory of an operand.
  template <class F>
  void visit(uint16_t operand, F f) {
    for (uint16_t other : meeting(operand))
      for (const Use& u : uses_[other]) f(u);
  }

  // The operands that may share a byte with one, itself too. Lists have a hundred members and few operands: each is
  // looked up once.
  const std::vector<uint16_t>& meeting(uint16_t operand) {
    std::vector<uint16_t>& meet = meeting_[operand];
    if (!meet.empty()) return meet;
    std::vector<uint8_t> known(g_.operands.size());
    for (int m = 0; m < g_.operands[operand].members; m++) {
      const Place& p = g_.place(operand, m);
      for (uint32_t t = g_.first_touch[p.storage]; t != kNoTouch; t = g_.touches[t].next) {
        const Touch& touch = g_.touches[t];
        if (known[touch.operand] || disjoint(p, g_.place(touch.operand, touch.member))) continue;
        known[touch.operand] = 1;
        meet.push_back(touch.operand);
      }
    }
    return meet;
  }

  // Makes one group of two, if that may be.
  void join(uint16_t a, uint16_t b) {
    if (a == b) return;
    if (a > b) std::swap(a, b);
    Group joined;
    if (groups_[a].nodes.size() + groups_[b].nodes.size() > kMaxNodes || !shape(groups_[a], groups_[b], joined)) return;
    std::merge(groups_[a].nodes.begin(), groups_[a].nodes.end(), groups_[b].nodes.begin(), groups_[b].nodes.end(),
               std::back_inserter(joined.nodes));
    if (!dependencies_allow(joined, a, b) || !extents_agree(joined) || stands_between(a, b) || stands_between(b, a))
      return;
    for (uint16_t n : groups_[b].nodes) of_[n] = a;
    groups_[a] = std::move(joined);
    groups_[b].nodes.clear();
  }

  // The space and rows of two groups in one.
  static bool shape(const Group& a, const Group& b, Group& joined) {
    const bool same =
        a.space == b.space && (a.row_space == b.row_space || a.row_space == kNone || b.row_space == kNone);
    const bool b_is_rows = a.row_space == b.space && b.row_space == kNone,
               a_is_rows = b.row_space == a.space && a.row_space == kNone;
    if (!same && !a_is_rows && !b_is_rows) return false;
    joined.space = a_is_rows ? b.space : a.space;
    joined.row_space = a.row_space == kNone ? b.row_space : a.row_space;
    joined.long_rows = a.long_rows || b.long_rows;
    return true;
  }

  bool dependencies_allow(const Group& joined, uint16_t a, uint16_t b) const {
    for (uint16_t n : joined.nodes)
      for (uint16_t earlier : before_[n])
        if ((of_[earlier] == a || of_[earlier] == b) && !together(joined, g_.nodes[earlier], g_.nodes[n])) return false;
    return true;
  }

  // Whether one program may run a node and a later one that depends on it.
  bool together(const Group& g, const Node& first, const Node& then) const {
    for (int o = 0; o < first.outputs; o++) {
      const uint16_t out = first.out[o];
      const bool column = extent_in(g, first, o, true) == Extent::column;
      for (int i = 0; i < then.inputs; i++) {
        const uint16_t in = then.in[i];
        const bool same = out == in, row = out == g_.operands[in].row && repeats_in(g, in);
        if (((!same && !row) || column) && !g_.apart(out, in)) return false;
      }
    }
    for (int o = 0; o < then.outputs; o++) {
      const uint16_t out = then.out[o];
      for (int i = 0; i < first.inputs; i++)
        if (first.in[i] != out && !g_.apart(first.in[i], out)) return false;
      for (int i = 0; i < first.outputs; i++)
        if (first.out[i] != out && !g_.apart(first.out[i], out)) return false;
    }
    return true;
  }

  // Whether an operand that repeats along its fastest dim does so along the columns of a group.
  bool repeats_in(const Group& g, uint16_t operand) const {
    return g.row_space != kNone && !g.long_rows &&
           g_.operands[operand].repeats * g_.counts[g_.spaces[g.row_space].first] ==
               g_.counts[g_.spaces[g.space].first];
  }

  // In one group a place that is written has one extent: a row value is not read element by element, nor the other way
  // round.
  bool extents_agree(const Group& g) const {
    if (g.row_space == kNone) return true;
    std::vector<std::optional<Extent>> written(g_.operands.size());
    for (uint16_t n : g.nodes)
      for (int i = 0; i < g_.nodes[n].outputs; i++) {
        std::optional<Extent>& e = written[g_.nodes[n].out[i]];
        const Extent own = extent_in(g, g_.nodes[n], i, true);
        if (e && *e != own) return false;
        e = own;
      }
    for (uint16_t n : g.nodes)
      for (int i = 0; i < g_.nodes[n].inputs; i++) {
        const std::optional<Extent>& e = written[g_.nodes[n].in[i]];
        if (e && *e != extent_in(g, g_.nodes[n], i, false)) return false;
      }
    return true;
  }

  // Whether `to` depends on `from` by way of other groups.
  bool stands_between(uint16_t from, uint16_t to) const {
    std::vector<uint8_t> seen(groups_.size());
    std::vector<uint16_t> open;
    auto look = [&](uint16_t group) {
      for (uint16_t n : groups_[group].nodes)
        for (uint16_t earlier : before_[n]) {
          const uint16_t g = of_[earlier];
          if (seen[g] || (group == to && (g == from || g == to))) continue;
          seen[g] = 1;
          open.push_back(g);
        }
    };
    look(to);
    while (!open.empty()) {
      const uint16_t g = open.back();
      open.pop_back();
      if (g == from) return true;
      look(g);
    }
    return false;
  }

  // The groups, each after those that it depends on; else as their first nodes were called.
  std::vector<Group> in_order() {
    std::vector<Group> order;
    std::vector<uint8_t> done(groups_.size());
    auto put = [&](auto&& self, uint16_t g) -> void {
      if (done[g]) return;
      done[g] = 1;
      for (uint16_t n : groups_[g].nodes)
        for (uint16_t earlier : before_[n]) self(self, of_[earlier]);
      order.push_back(std::move(groups_[g]));
    };
    for (uint16_t n = 0; n < of_.size(); n++) put(put, of_[n]);
    return order;
  }

  const Graph& g_;
  std::vector<Group> groups_;           // by their first nodes; those that joined an earlier one are empty
  std::vector<uint16_t> of_;            // the group of each node
  std::vector<std::vector<Use>> uses_;  // by operand
  std::vector<std::vector<uint16_t>> meeting_;
  std::vector<std::vector<uint16_t>> before_;  // nodes that each node depends on
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
