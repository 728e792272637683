// Rule: liveness. A program writes a result if its storage is live or a later program of the plan reads it; other
// results exist in tiles alone.
//
// Reason: most results of a chain are dead when the chain runs. Their memory traffic is what fusion saves.
#include "fuser.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "rows.h"
#include "schedule.h"

namespace neuron::fusion {

namespace {

class Builder final : public Lowering {
 public:
  struct State {
    const Graph& graph;
    const Group& group;
    Launch& launch;
    std::map<std::pair<uint16_t, Extent>, Lanes> values;  // of operands: what was loaded or written last
  };

  Builder(State& state, uint16_t index)
      : Lowering(state.launch.program, state.graph.nodes[index]), s_(state), index_(index) {
    program_.set_extent_of_numbers(extent_in(s_.group, node_, 0, true));
  }

  // The value of an operand that this program wrote.
  static Lanes written(State& state, uint16_t operand, Extent extent) { return state.values.at({operand, extent}); }

 protected:
  Lanes input(int i) override {
    const uint16_t operand = node_.in[i];
    const Extent extent = extent_in(s_.group, node_, i, false);
    if (auto it = s_.values.find({operand, extent}); it != s_.values.end()) return it->second;
    const uint16_t row = s_.graph.operands[operand].row;
    // What repeats along the columns is one value a row.
    if (extent == Extent::full && s_.group.row_space != kNone && row != kNone &&
        s_.graph.operands[operand].repeats == columns())
      return load(row, Extent::row);
    return load(operand, extent);
  }
  Dtype input_dtype(int i) const override { return s_.graph.place(node_.in[i]).dtype; }
  Dtype output_dtype(int i) const override { return s_.graph.place(node_.out[i]).dtype; }
  ValueId number(int i) override {
    s_.launch.numbers.emplace_back(index_, static_cast<uint16_t>(i));
    return program_.scalar();
  }
  void result(int i, Lanes v) override {
    const Extent extent = extent_in(s_.group, node_, i, true);
    if (program_.values()[v.id].from == TileProgram::Value::From::scalar || program_.extent(v.id) != extent)
      v.id = program_.expand(v.id, extent);
    s_.values[{node_.out[i], extent}] = v;
  }

 public:
  uint16_t access(uint16_t operand, Extent extent) {
    s_.launch.operands.push_back(operand);
    return program_.access(s_.graph.place(operand).dtype, extent, operand);
  }

 private:
  Lanes load(uint16_t operand, Extent extent) {
    if (auto it = s_.values.find({operand, extent}); it != s_.values.end()) return it->second;
    const Lanes v{program_.load(access(operand, extent)), !is_integer(s_.graph.place(operand).dtype)};
    s_.values[{operand, extent}] = v;
    return v;
  }
  int64_t columns() const {
    const auto& g = s_.graph;
    return g.counts[g.spaces[s_.group.space].first] / g.counts[g.spaces[s_.group.row_space].first];
  }
  State& s_;
  uint16_t index_;
};

// Which results of each group are written: (group, operand) pairs.
class Liveness {
 public:
  Liveness(const Graph& graph, const std::vector<Group>& groups, const std::vector<uint8_t>& live)
      : graph_(graph), groups_(groups), live_(live) {}

  // Whether an operand that group `at` writes must reach memory.
  bool needed(size_t at, uint16_t operand) const {
    bool overwritten = false;
    for (size_t later = at + 1; later < groups_.size(); later++)
      for (uint16_t n : groups_[later].nodes) {
        const Node& node = graph_.nodes[n];
        for (int i = 0; i < node.inputs; i++)
          if (operand == node.in[i] || !graph_.apart(operand, node.in[i])) return true;
        for (int i = 0; i < node.outputs; i++) overwritten |= node.out[i] == operand;
        if (overwritten) return false;
      }
    for (int m = 0; m < graph_.operands[operand].members; m++)
      if (live_[graph_.place(operand, m).storage]) return true;
    return false;
  }

 private:
  const Graph& graph_;
  const std::vector<Group>& groups_;
  const std::vector<uint8_t>& live_;
};

}  // namespace

Plan fuse(const Graph& graph, const std::vector<uint8_t>& live) {
  Plan plan;
  const std::vector<Group> groups = schedule(graph);
  const Liveness liveness(graph, groups, live);
  std::vector<uint8_t> temporary(live.size());
  for (size_t at = 0; at < groups.size(); at++) {
    const Group& group = groups[at];
    Launch& launch = plan.launches.emplace_back();
    launch.nodes = group.nodes;
    launch.space = group.space;
    launch.row_space = group.row_space;
    if (group.nodes.size() > 1) plan.fused += static_cast<uint32_t>(group.nodes.size());
    std::map<uint16_t, uint16_t> last_writer;
    for (uint16_t n : group.nodes)
      for (int i = 0; i < graph.nodes[n].outputs; i++) last_writer[graph.nodes[n].out[i]] = n;
    Builder::State state{graph, group, launch, {}};
    for (uint16_t n : group.nodes) {
      const Node& node = graph.nodes[n];
      Builder builder(state, n);
      node.row->lower(builder, *node.row);
      for (int i = 0; i < node.outputs; i++) {
        if (last_writer[node.out[i]] != n || !liveness.needed(at, node.out[i])) {
          plan.stores_elided++;
          continue;
        }
        const Extent extent = extent_in(group, node, i, true);
        const Lanes v = Builder::written(state, node.out[i], extent);
        launch.program.store(builder.access(node.out[i], extent), v.id);
        for (int m = 0; m < graph.operands[node.out[i]].members; m++) {
          const uint16_t storage = graph.place(node.out[i], m).storage;
          if (!live[storage]) temporary[storage] = 1;
        }
      }
    }
    launch.program.seal();
  }
  for (size_t s = 0; s < temporary.size(); s++)
    if (temporary[s]) plan.temporaries.push_back(static_cast<uint16_t>(s));
  return plan;
}

void execute(const Plan& plan, const Graph& graph, std::span<const uint32_t> numbers, std::span<char* const> memory,
             const TileParallel& parallel, const std::function<void(const Launch&, bool before)>& launched) {
  thread_local std::vector<TileAccess> accesses;
  thread_local std::vector<uint32_t> scalars;
  thread_local std::vector<TileRun> runs;
  for (const Launch& launch : plan.launches) {
    const Space& space = graph.spaces[launch.space];
    const size_t per_member = launch.operands.size(), per_run = launch.numbers.size();
    accesses.resize(per_member * space.members);
    scalars.resize(per_run * space.members + 1);
    runs.resize(space.members);
    for (size_t m = 0; m < space.members; m++) {
      for (size_t i = 0; i < per_member; i++) {
        const Place& p = graph.place(launch.operands[i], static_cast<int>(m));
        TileAccess& a = accesses[m * per_member + i];
        a.base = memory[p.storage] + p.offset * size_of(p.dtype);
        a.ndim = p.ndim;
        std::copy(p.size, p.size + p.ndim, a.size);
        std::copy(p.stride, p.stride + p.ndim, a.stride);
      }
      for (size_t i = 0; i < per_run; i++) {
        const auto [n, position] = launch.numbers[i];
        const Node& node = graph.nodes[n];
        scalars[m * per_run + i] = numbers[node.first_scalar + m * node.scalars + position];
      }
      TileRun& run = runs[m];
      const int64_t count = graph.counts[space.first + m];
      run.rows = launch.row_space == kNone ? count : graph.counts[graph.spaces[launch.row_space].first + m];
      run.cols = launch.row_space == kNone ? 1 : count / run.rows;
      run.accesses = accesses.data() + m * per_member;
      run.scalars = scalars.data() + m * per_run;
    }
    if (launched) launched(launch, true);
    run(launch.program, runs, parallel);
    if (launched) launched(launch, false);
  }
}

std::string describe(const Plan& plan, const Graph& graph) {
  std::ostringstream out;
  for (size_t i = 0; i < plan.launches.size(); i++) {
    const Launch& launch = plan.launches[i];
    const Space& space = graph.spaces[launch.space];
    out << "program " << i << ": " << graph.counts[space.first] << " elements";
    if (launch.row_space != kNone) out << " in " << graph.counts[graph.spaces[launch.row_space].first] << " rows";
    if (space.members > 1) out << ", and " << space.members - 1 << " more tensors";
    out << ";";
    for (uint16_t n : launch.nodes) out << " " << graph.nodes[n].row->name;
    out << "\n";
    for (size_t a = 0; a < launch.operands.size(); a++) {
      const Place& p = graph.place(launch.operands[a]);
      out << "m" << a << " = storage " << p.storage << " + " << p.offset << ":";
      for (int d = 0; d < p.ndim; d++) out << " " << p.size[d] << "*" << p.stride[d];
      out << "\n";
    }
    out << launch.program.text();
  }
  out << plan.stores_elided << " stores elided\n";
  return out.str();
}

}  // namespace neuron::fusion
