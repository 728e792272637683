#include "tile_program.h"

#include <algorithm>
#include <sstream>

namespace neuron {

ValueId TileProgram::add(Value::From from, Extent extent, uint16_t index) {
  values_.push_back({from, extent, index});
  return static_cast<ValueId>(values_.size() - 1);
}

uint16_t TileProgram::access(Dtype dtype, Extent extent, uint16_t memory) {
  accesses_.push_back({dtype, extent, memory});
  return static_cast<uint16_t>(accesses_.size() - 1);
}

ValueId TileProgram::load(uint16_t access) {
  const ValueId out = add(Value::From::access, accesses_[access].extent, access);
  Step step{Step::Kind::load};
  step.extent = accesses_[access].extent;
  step.out = out;
  step.access = access;
  steps_.push_back(step);
  return out;
}

ValueId TileProgram::scalar() { return add(Value::From::scalar, Extent::row, static_cast<uint16_t>(scalars_++)); }

ValueId TileProgram::constant(uint32_t bits) {
  for (auto& [value, index] : constant_values_)
    if (constants_[index] == bits) return value;
  constants_.push_back(bits);
  const auto index = static_cast<uint16_t>(constants_.size() - 1);
  // The top bit tells constants() from the run's scalars.
  const ValueId v = add(Value::From::scalar, Extent::row, static_cast<uint16_t>(0x8000 | index));
  constant_values_.emplace_back(v, index);
  return v;
}

ValueId TileProgram::map(LaneOp op, ValueId a, ValueId b, ValueId c) {
  Step step{Step::Kind::map};
  step.op = op;
  step.in[0] = a;
  step.in[1] = b;
  step.in[2] = c;
  bool full = false, scalar = true, row = false, column = false;
  for (ValueId v : step.in) {
    if (v == kNone || values_[v].from == Value::From::scalar) continue;
    scalar = false;
    full |= values_[v].extent == Extent::full;
    row |= values_[v].extent == Extent::row;
    column |= values_[v].extent == Extent::column;
  }
  step.extent = scalar ? extent_of_numbers_ : full ? Extent::full : column ? Extent::column : Extent::row;
  // What has been computed is not computed again.
  for (const Step& s : steps_)
    if (s.kind == Step::Kind::map && s.op == op && s.extent == step.extent && std::equal(s.in, s.in + 3, step.in))
      return s.out;
  if (step.extent == Extent::full && row) full_after_row_ = true;
  step.out = add(Value::From::step, step.extent, static_cast<uint16_t>(steps_.size()));
  steps_.push_back(step);
  return step.out;
}

ValueId TileProgram::expand(ValueId a, Extent extent) {
  Step step{Step::Kind::map};
  step.in[0] = a;
  step.extent = extent;
  if (extent == Extent::full && values_[a].from != Value::From::scalar) full_after_row_ = true;
  step.out = add(Value::From::step, extent, static_cast<uint16_t>(steps_.size()));
  steps_.push_back(step);
  return step.out;
}

ValueId TileProgram::reduce(LaneOp op, ValueId a) {
  // The sum of a row of zeros but for one element is that element, added to zero.
  const auto made = std::ranges::find(steps_, a, &Step::out);
  if (op == LaneOp::sum && made != steps_.end() && made->kind == Step::Kind::scatter) {
    const ValueId index = made->in[1];
    return map(LaneOp::add, gather(a, index), constant(0));
  }
  Step step{Step::Kind::reduce};
  step.op = op;
  step.in[0] = a;
  step.extent = Extent::row;
  step.out = add(Value::From::step, Extent::row, static_cast<uint16_t>(steps_.size()));
  step.number = static_cast<uint16_t>(reductions_++);
  steps_.push_back(step);
  return step.out;
}

ValueId TileProgram::accumulate(LaneOp op, ValueId a) {
  Step step{Step::Kind::accumulate};
  if (values_[a].extent == Extent::row && values_[a].from != Value::From::scalar) full_after_row_ = true;
  step.op = op;
  step.in[0] = a;
  step.extent = Extent::column;
  step.out = add(Value::From::step, Extent::column, static_cast<uint16_t>(steps_.size()));
  step.number = static_cast<uint16_t>(accumulations_++);
  steps_.push_back(step);
  return step.out;
}

ValueId TileProgram::gather(ValueId a, ValueId index) {
  Step step{Step::Kind::gather};
  step.in[0] = a;
  step.in[1] = index;
  step.extent = Extent::row;
  full_after_row_ = true;
  step.out = add(Value::From::step, Extent::row, static_cast<uint16_t>(steps_.size()));
  steps_.push_back(step);
  return step.out;
}

ValueId TileProgram::scatter(ValueId a, ValueId index) {
  Step step{Step::Kind::scatter};
  step.in[0] = a;
  step.in[1] = index;
  full_after_row_ = true;
  step.out = add(Value::From::step, Extent::full, static_cast<uint16_t>(steps_.size()));
  steps_.push_back(step);
  return step.out;
}

void TileProgram::store(uint16_t access, ValueId value) {
  Step step{Step::Kind::store};
  step.extent = accesses_[access].extent;
  step.in[0] = value;
  step.access = access;
  steps_.push_back(step);
}

void TileProgram::number_steps() {
  for (size_t i = 0; i < steps_.size(); i++) {
    for (ValueId v : steps_[i].in)
      if (v != kNone) values_[v].last = static_cast<uint16_t>(i);
    const ValueId out = steps_[i].out;
    if (out == kNone) continue;
    values_[out].last = static_cast<uint16_t>(i);
    if (values_[out].from == Value::From::step) values_[out].index = static_cast<uint16_t>(i);
  }
}

// Two steps become one where nobody else uses the first one's result: half the memory traffic of the tile, the same
// roundings.
void TileProgram::merge_pairs() {
  struct Pair {
    LaneOp first, second;
    int position;   // of the first one's result among the second one's inputs
    LaneOp merged;  // its inputs: the first one's, then the second one's others; what is one too many repeats the first
  };
  using enum LaneOp;
  static constexpr Pair kPairs[] = {
      {mul, add, 0, mul_add},     {mul, add, 1, mul_add},       {mul, sub, 0, mul_sub},
      {mul, sub, 1, mul_rsub},    {mul, mul, 0, mul_mul},       {add, mul, 0, add_mul},
      {add, mul, 1, add_mul},     {add, add, 0, add_add},       {add, add, 1, add_add},
      {sub, mul, 0, sub_mul},     {sub, mul, 1, sub_mul},       {sub, add, 0, sub_add},
      {sub, add, 1, sub_add},     {add, div, 1, div_add},       {neg, exp, 0, exp_neg},
      {sub, exp, 0, exp_sub},     {exp_neg, div_add, 0, swish}, {exp_neg, div_add, 1, swish},
      {swish, mul, 0, swish_mul}, {swish, mul, 1, swish_mul}};
  std::vector<uint16_t> uses(values_.size());
  for (const Step& step : steps_)
    for (ValueId v : step.in)
      if (v != kNone) uses[v]++;
  auto merge = [&](Step& second) {
    for (const Pair& pair : kPairs) {
      if (pair.second != second.op) continue;
      const ValueId v = second.in[pair.position];
      if (values_[v].from != Value::From::step || uses[v] != 1) continue;
      const auto first = std::find_if(steps_.begin(), steps_.end(), [&](const Step& s) { return s.out == v; });
      if (first->kind != Step::Kind::map || first->op != pair.first || first->extent != second.extent) continue;
      ValueId in[3] = {kNone, kNone, kNone};
      int n = 0;
      for (ValueId i : first->in)
        if (i != kNone) in[n++] = i;
      for (int k = 0; k < 3; k++)
        if (k != pair.position && second.in[k] != kNone) in[n++] = second.in[k];
      if (n > info(pair.merged).inputs) {
        if (in[n - 1] != in[0]) continue;
        in[n - 1] = kNone;
      }
      second.op = pair.merged;
      std::copy(in, in + 3, second.in);
      first->kind = Step::Kind::gone;
      first->out = kNone;
      return true;
    }
    return false;
  };
  for (Step& step : steps_)
    while (step.kind == Step::Kind::map && merge(step)) {
    }
  std::erase_if(steps_, [](const Step& s) { return s.kind == Step::Kind::gone; });
}

// What is stored as it was loaded, while another store writes where it lies, is copied before.
void TileProgram::keep_loads() {
  for (size_t i = 0; i < steps_.size(); i++) {
    if (steps_[i].kind != Step::Kind::store || values_[steps_[i].in[0]].from != Value::From::access) continue;
    const ValueId v = steps_[i].in[0];
    const uint16_t memory = accesses_[values_[v].index].memory;
    if (std::ranges::none_of(steps_, [&](const Step& s) {
          return s.kind == Step::Kind::store && accesses_[s.access].memory == memory && &s != &steps_[i];
        }))
      continue;
    Step copy{Step::Kind::map};
    copy.extent = values_[v].extent;
    copy.in[0] = v;
    copy.out = steps_[i].in[0] = add(Value::From::step, copy.extent, 0);
    const auto load = std::ranges::find(steps_, v, &Step::out);
    steps_.insert(load + 1, copy);
    i++;
  }
}

void TileProgram::seal() {
  merge_pairs();
  keep_loads();
  number_steps();
  // A load of plain memory is the memory itself: a store waits until what was loaded from there has been used.
  std::vector<Step> late;
  for (size_t i = 0; i < steps_.size(); i++) {
    if (steps_[i].kind != Step::Kind::store) continue;
    for (const Value& v : values_)
      if (v.from == Value::From::access && accesses_[v.index].memory == accesses_[steps_[i].access].memory &&
          v.last > i) {
        late.push_back(steps_[i]);
        steps_[i].kind = Step::Kind::gone;
        break;
      }
  }
  if (!late.empty()) {
    std::erase_if(steps_, [](const Step& s) { return s.kind == Step::Kind::gone; });
    steps_.insert(steps_.end(), late.begin(), late.end());
    number_steps();
  }
  choose_direct_stores();
  if (has_loops()) {
    plan_ = plan_loops(*this);
  } else {
    for (uint16_t i = 0; i < steps_.size(); i++) plan_.items.push_back({i});
  }
  mark_uses();
  assign_buffers();
  weigh();
}

void TileProgram::mark_uses() {
  for (const LoopPlan::Item& item : plan_.items) {
    if (item.loop != LoopPlan::Item::kNone) continue;
    const Step& step = steps_[item.step];
    for (ValueId v : step.in)
      if (v != kNone) {
        values_[v].looped = false;
        values_[v].mapped &= step.kind == Step::Kind::map && step.extent == Extent::full;
      }
  }
}

// A store may be direct if its value comes from a step, no other direct store has it, and nothing reads the old content
// of the same memory after the value's step.
void TileProgram::choose_direct_stores() {
  std::vector<uint8_t> taken(values_.size());
  for (Step& store : steps_) {
    if (store.kind != Step::Kind::store) continue;
    const Value& v = values_[store.in[0]];
    if (v.from != Value::From::step || v.extent != store.extent || taken[store.in[0]]) continue;
    bool safe = true;
    for (const Value& other : values_)
      if (other.from == Value::From::access && accesses_[other.index].memory == accesses_[store.access].memory)
        safe &= other.last <= v.index;
    for (const Step& other : steps_)
      if (&other != &store && other.kind == Step::Kind::store &&
          accesses_[other.access].memory == accesses_[store.access].memory)
        safe = false;
    store.direct = safe;
    taken[store.in[0]] = safe;
  }
}

// A value takes a free buffer where it is computed and gives it back after its last use.
void TileProgram::assign_buffers() {
  struct Use {
    std::vector<ValueId> in, out;
    bool in_place;  // element by element, in one step
  };
  std::vector<Use> uses;
  std::vector<size_t> last(values_.size(), 0);
  for (const LoopPlan::Item& item : plan_.items) {
    Use use{};
    if (item.loop == LoopPlan::Item::kNone) {
      const Step& step = steps_[item.step];
      std::copy_if(step.in, step.in + 3, std::back_inserter(use.in), [](ValueId v) { return v != kNone; });
      if (step.out != kNone) use.out.push_back(step.out);
      use.in_place = step.kind == Step::Kind::map;
    } else {
      const Loop& loop = plan_.loops[item.loop];
      use.in = loop.inputs;
      for (const Loop::Output& o : loop.outputs)
        if (std::ranges::find(use.out, o.value) == use.out.end()) use.out.push_back(o.value);
      for (uint16_t i : loop.reductions) use.out.push_back(steps_[i].out);
    }
    for (const auto* side : {&use.in, &use.out})
      for (ValueId v : *side) last[v] = uses.size();
    uses.push_back(std::move(use));
  }
  std::vector<uint16_t> free[kExtents];
  for (size_t i = 0; i < uses.size(); i++) {
    std::vector<ValueId> ended;
    auto end = [&](ValueId v) {
      if (values_[v].from != Value::From::scalar && last[v] == i && std::ranges::find(ended, v) == ended.end())
        ended.push_back(v);
    };
    auto give_back = [&](ValueId v) { free[static_cast<int>(values_[v].extent)].push_back(values_[v].slot); };
    for (ValueId v : uses[i].in) end(v);
    // What was loaded may be read again for each row.
    if (uses[i].in_place)
      std::erase_if(ended, [&](ValueId v) {
        const bool now = values_[v].extent == values_[uses[i].out[0]].extent && values_[v].from == Value::From::step;
        if (now) give_back(v);
        return now;
      });
    for (ValueId v : uses[i].out) {
      auto& pool = free[static_cast<int>(values_[v].extent)];
      if (pool.empty()) {
        values_[v].slot = static_cast<uint16_t>(slots_[static_cast<int>(values_[v].extent)]++);
      } else {
        values_[v].slot = pool.back();
        pool.pop_back();
      }
      end(v);
    }
    for (ValueId v : ended) give_back(v);
  }
}

// Weights from the kernels' measured times. What is done once a row or column costs nothing, nor does a row of plain
// memory of which one element is looked up.
void TileProgram::weigh() {
  for (const Step& step : steps_) {
    const bool looked_up = step.kind == Step::Kind::load && accesses_[step.access].dtype == Dtype::float32 &&
                           std::all_of(steps_.begin(), steps_.end(), [&](const Step& s) {
                             return s.kind == Step::Kind::gather || std::find(s.in, s.in + 3, step.out) == s.in + 3;
                           });
    const bool sums = step.kind == Step::Kind::reduce || step.kind == Step::Kind::accumulate;
    if (looked_up || (step.extent != Extent::full && !sums))
      continue;
    else if (step.kind == Step::Kind::map)
      cost_ += step.op == LaneOp::pow                                                              ? 5
               : step.op >= LaneOp::exp_neg || (step.op >= LaneOp::exp && step.op <= LaneOp::cosh) ? 0.8
               : step.op == LaneOp::uniform_bits                                                   ? 0.8
                                                                                                   : 0.1;
    else
      cost_ += 0.1;
  }
}

std::string TileProgram::text() const {
  std::ostringstream out;
  auto value = [&](ValueId v) {
    const Value& x = values_[v];
    if (x.from != Value::From::scalar)
      out << " v" << v;
    else if (x.index & 0x8000)
      out << " #" << std::hex << constants_[x.index & 0x7fff] << std::dec;
    else
      out << " s" << x.index;
  };
  for (const Step& step : steps_) {
    constexpr const char* kAssign[kExtents] = {" =", "[rows] =", "[columns] ="};
    if (step.out != kNone) out << "v" << step.out << kAssign[static_cast<int>(step.extent)];
    if (step.kind == Step::Kind::load)
      out << " load m" << step.access << ":" << info(accesses_[step.access].dtype).name;
    if (step.kind == Step::Kind::store)
      out << "store m" << step.access << ":" << info(accesses_[step.access].dtype).name;
    if (step.kind == Step::Kind::gather) out << " gather";
    if (step.kind == Step::Kind::scatter) out << " scatter";
    if (step.kind == Step::Kind::map || step.kind == Step::Kind::reduce || step.kind == Step::Kind::accumulate)
      out << " " << info(step.op).name;
    for (ValueId v : step.in)
      if (v != kNone) value(v);
    out << "\n";
  }
  return out.str();
}

}  // namespace neuron
