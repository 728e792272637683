// Which steps become loops: those of full extent that follow one another, with the reductions of what they compute.
// Rule: a step that needs a result of the loop in the making, in a way that is not lane by lane, ends it. Others run
// before it: row values never depend on full values but by reductions.
#include <algorithm>

#include "../tile_program.h"
#include "loop.h"

namespace neuron {

namespace {

class Planner {
 public:
  explicit Planner(const TileProgram& program) : program_(program), made_(program.values().size(), false) {}

  LoopPlan plan() {
    const auto& steps = program_.steps();
    for (uint16_t i = 0; i < steps.size(); i++) {
      const Step& step = steps[i];
      const bool needs = std::any_of(step.in, step.in + 3, [&](ValueId v) { return v != kNone && made_[v]; });
      if (joins(step)) {
        // A row value of this loop is known when it ends.
        if (std::any_of(step.in, step.in + 3, [&](ValueId v) { return v != kNone && made_[v] && !full(v); }) ||
            inputs_with(step) > Loop::kMaxInputs)
          close();
        add_inputs(step);
        steps_.push_back(i);
        if (step.out != kNone) made_[step.out] = true;
      } else if (step.kind == Step::Kind::store && needs && step.extent == Extent::full) {
        stores_.push_back(i);
      } else {
        if (needs || step.kind == Step::Kind::store || step.kind == Step::Kind::scatter) close();
        plan_.items.push_back({i});
      }
    }
    close();
    return std::move(plan_);
  }

 private:
  using Step = TileProgram::Step;
  static constexpr ValueId kNone = TileProgram::kNone;

  bool full(ValueId v) const { return program_.values()[v].extent == Extent::full; }
  bool joins(const Step& step) const {
    if (step.kind == Step::Kind::map) return step.extent == Extent::full && has_loop_form(step.op);
    return step.kind == Step::Kind::reduce && full(step.in[0]);
  }
  bool is_narrow(uint16_t access) const { return has_loop_form(program_.accesses()[access].dtype); }
  // Whether a loop can store its value where it computes it: nobody needs what is there.
  bool is_done_here(uint16_t store) const {
    const Step& step = program_.steps()[store];
    return step.direct && is_narrow(step.access);
  }
  bool is_input(ValueId v) const {
    return v != kNone && !made_[v] && std::find(inputs_.begin(), inputs_.end(), v) == inputs_.end();
  }
  size_t inputs_with(const Step& step) const {
    return inputs_.size() +
           static_cast<size_t>(std::count_if(step.in, step.in + 3, [&](ValueId v) { return is_input(v); }));
  }
  void add_inputs(const Step& step) {
    for (ValueId v : step.in)
      if (is_input(v)) inputs_.push_back(v);
  }

  void close() {
    const auto& steps = program_.steps();
    auto narrow_input = [&](ValueId v) {
      const TileProgram::Value& x = program_.values()[v];
      return x.from == TileProgram::Value::From::access && is_narrow(x.index);
    };
    // Alone on one run of memory, a kernel does as well; so do functions and reductions.
    const bool alone = steps_.size() == 1 && (!program_.has_rows() || steps[steps_[0]].kind == Step::Kind::reduce ||
                                              is_loop_call(steps[steps_[0]].op));
    if (alone && std::ranges::none_of(inputs_, narrow_input) &&
        std::ranges::none_of(stores_, [&](uint16_t i) { return is_done_here(i); })) {
      plan_.items.push_back({steps_[0]});
    } else if (!steps_.empty()) {
      Loop loop;
      for (uint16_t i : steps_) {
        if (steps[i].kind == Step::Kind::reduce)
          loop.reductions.push_back(i);
        else if (used_elsewhere(i))
          loop.outputs.push_back({steps[i].out});
        loop.calls |= steps[i].kind == Step::Kind::map && is_loop_call(steps[i].op);
      }
      for (uint16_t i : stores_)
        if (is_done_here(i)) loop.outputs.push_back({steps[i].in[0], i});
      loop.steps = std::move(steps_);
      loop.inputs = std::move(inputs_);
      plan_.items.push_back({0, static_cast<uint16_t>(plan_.loops.size())});
      plan_.loops.push_back(std::move(loop));
    }
    for (uint16_t i : stores_) plan_.items.push_back({i});
    steps_.clear();
    inputs_.clear();
    stores_.clear();
    std::fill(made_.begin(), made_.end(), false);
  }

  // By other steps than those of this loop and the stores that it can do.
  bool used_elsewhere(uint16_t step) const {
    const ValueId v = program_.steps()[step].out;
    const auto& steps = program_.steps();
    for (uint16_t i = step; i < steps.size(); i++) {
      if (std::find(steps[i].in, steps[i].in + 3, v) == steps[i].in + 3 || std::ranges::binary_search(steps_, i))
        continue;
      if (!std::ranges::binary_search(stores_, i) || !is_done_here(i)) return true;
    }
    return false;
  }

  const TileProgram& program_;
  LoopPlan plan_;
  std::vector<uint16_t> steps_;   // of the loop in the making
  std::vector<uint16_t> stores_;  // that follow it
  std::vector<uint16_t> inputs_;
  std::vector<bool> made_;  // values that it makes
};

}  // namespace

LoopPlan plan_loops(const TileProgram& program) { return Planner(program).plan(); }

}  // namespace neuron
