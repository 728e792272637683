// Writes the machine code of a loop. Values live in registers; a value that finds none is put on the stack and fetched
// again. What is one for all lanes keeps its register, unless operations are called: calls keep no registers. A turn of
// a loop with calls takes several blocks of lanes, so that a function works on one while others are under way.
//
// Of NaNs, arithmetic gives one (see one_nan in simd/lanes.cpp). Inside a loop any NaN stands for it as long as nobody
// looks at its bits: such values are `loose`, and settled before a store or an operation that hands on bits.
#include <algorithm>
#include <array>
#include <limits>

#include "../reductions.h"
#include "../simd/lanes.h"
#include "../tile_program.h"
#include "assembler.h"
#include "loop.h"
#include "recipes.h"

namespace neuron {

namespace {

using namespace x86;
using Step = TileProgram::Step;

// ---- registers -----------------------------------------------------------------------------------------------------
constexpr int kRegisters = 32;
constexpr int kMaxPinned = 12;
constexpr Mask kRest = 7;  // lanes that are left at the end
constexpr Gpr kArguments = rbx, kIndex = r12, kEnd = r13, kScratch = rax;
constexpr Gpr kSaved[] = {rbx, rbp, r12, r13, r14, r15};
constexpr Gpr kPointersOfPlain[] = {r14, r15, rcx, rdx, rsi, rdi, r8, r9, r10, r11};
constexpr size_t kPointersBesideCalls = 2;
constexpr int kNever = std::numeric_limits<int>::max();
static_assert(LaneKernels::kCallLanes == Loop::kMostBlocks * Loop::kLanes);

struct Value {
  enum class Home : uint8_t { none, vector, narrow, one, word } home = Home::none;
  int at = 0;                // pointer, or offset in the code
  Dtype dtype{};             // of a narrow home
  int segment = -1;          // where it is computed; -1: an input
  bool kept = false;         // for a later segment or a function, on the stack
  std::vector<int> outputs;  // pointers
  // In the turn that is being written:
  int reg = -1;
  int next = kNever;  // the next step of the segment that uses it
  bool stored = false, loose = false;
};

// Steps between calls. A segment is written for each block of a turn, then its call, which takes all blocks at once.
struct Segment {
  size_t first, last;  // steps; the last one is the call, if it ends with one
  bool call;
  std::vector<std::array<int, 3>> next;  // [step][k]: the step of the segment after it that uses its input k
  std::vector<int> uses;                 // of each value: the first step of the segment that uses it
};

class Emitter {
 public:
  Emitter(const TileProgram& program, const Loop& loop, const Loop::Layout& layout)
      : program_(program), loop_(loop), layout_(layout), local_(program.values().size(), 0) {
    for (uint32_t w : kWordBits) a_.word(w);
    for (uint16_t i : loop.reductions) a_.word(reduction(program.steps()[i].op).identity);
    add_values();
    add_segments();
  }

  LoopCode emit() {
    const auto entry = static_cast<size_t>(a_.here());
    const int blocks = static_cast<int>(loop_.blocks());
    for (Gpr r : kSaved) a_.push(r);
    a_.move(rbp, rsp);
    a_.add(rsp, -64 * (blocks * static_cast<int>(values_.size()) + 2 * static_cast<int>(loop_.reductions.size())));
    a_.align_down(rsp, 64);
    a_.move(kArguments, rdi);
    a_.load(kEnd, argument(Loop::kWhole));
    pin();
    const int32_t row = a_.here();
    begin_row();
    a_.test(kEnd);
    const int32_t none = a_.jump_ahead(equal);
    const int32_t top = a_.here();
    turn(false);
    a_.add(kIndex, static_cast<int32_t>(loop_.width()));
    a_.compare(kIndex, kEnd);
    a_.jump(below, top);
    a_.land(none);
    a_.load(kScratch, argument(Loop::kMasks));
    a_.test(kScratch);
    const int32_t done = a_.jump_ahead(equal);
    turn(true);
    a_.land(done);
    end_row();
    a_.load(kScratch, argument(Loop::kRows));
    a_.add(kScratch, -1);
    a_.store(argument(Loop::kRows), kScratch);
    a_.test(kScratch);
    a_.jump(not_equal, row);
    a_.move(rsp, rbp);
    for (auto r = std::rbegin(kSaved); r != std::rend(kSaved); ++r) a_.pop(*r);
    a_.zero_upper();
    a_.ret();
    return {a_.code(), entry};
  }

 private:
  bool is_map(uint16_t step) const { return program_.steps()[step].kind == Step::Kind::map; }
  Value& value(ValueId v) { return values_[local_[v]]; }
  static Address argument(int i) { return {kArguments, rsp, 1, 8 * i}; }
  static Address pointer(size_t i) { return argument(Loop::kPointers + static_cast<int>(i)); }
  size_t pointers() const { return loop_.inputs.size() + loop_.outputs.size() + loop_.reductions.size(); }
  Address pitch(size_t i) const { return pointer(pointers() + i); }

  void add_values() {
    values_.reserve(loop_.inputs.size() + loop_.steps.size());
    auto add = [&](ValueId v) -> Value& {
      local_[v] = static_cast<uint16_t>(values_.size());
      return values_.emplace_back();
    };
    for (size_t k = 0; k < loop_.inputs.size(); k++) {
      const ValueId v = loop_.inputs[k];
      const TileProgram::Value& from = program_.values()[v];
      Value& x = add(v);
      if (from.from == TileProgram::Value::From::scalar && from.index & 0x8000) {  // a constant
        x.home = Value::Home::word;
        x.at = a_.here();
        a_.word(program_.constants()[from.index & 0x7fff]);
      } else {
        x.home = layout_.is_narrow(k)       ? Value::Home::narrow
                 : layout_.vectors >> k & 1 ? Value::Home::vector
                                            : Value::Home::one;
        x.at = static_cast<int>(k);
        if (x.home == Value::Home::narrow) x.dtype = program_.accesses()[from.index].dtype;
      }
    }
    for (uint16_t i : loop_.steps)
      if (is_map(i)) add(program_.steps()[i].out);
    for (size_t k = 0; k < loop_.outputs.size(); k++)
      value(loop_.outputs[k].value).outputs.push_back(static_cast<int>(loop_.inputs.size() + k));
  }

  void add_segments() {
    size_t first = 0;
    for (size_t s = 0; s < loop_.steps.size(); s++) {
      const bool call = is_call(s);
      if (!call && s + 1 < loop_.steps.size()) continue;
      Segment segment{first, s, call, std::vector<std::array<int, 3>>(s + 1 - first),
                      std::vector<int>(values_.size(), kNever)};
      const int number = static_cast<int>(segments_.size());
      for (size_t i = s + 1; i-- > first;) {
        const Step& step = step_of(i);
        if (step.out != TileProgram::kNone && is_map(loop_.steps[i])) value(step.out).segment = number;
        if (is_call(i)) continue;
        for (size_t k = 0; k < 3; k++)
          segment.next[i - first][k] = step.in[k] == TileProgram::kNone ? kNever : segment.uses[local_[step.in[k]]];
        for (ValueId v : step.in)
          if (v != TileProgram::kNone) segment.uses[local_[v]] = static_cast<int>(i);
      }
      segments_.push_back(std::move(segment));
      first = s + 1;
    }
    for (size_t g = 0; g < segments_.size(); g++)
      for (size_t s = segments_[g].first; s <= segments_[g].last; s++)
        for (ValueId v : step_of(s).in)
          if (v != TileProgram::kNone && value(v).segment >= 0)
            value(v).kept |= is_call(s) || value(v).segment < static_cast<int>(g);
  }
  const Step& step_of(size_t s) const { return program_.steps()[loop_.steps[s]]; }
  bool is_call(size_t s) const { return is_map(loop_.steps[s]) && is_loop_call(step_of(s).op); }

  // Registers for what stays in a row: addresses, running lanes, numbers. Constants are there once and for all.
  void pin() {
    const size_t registers = loop_.calls ? kPointersBesideCalls : std::size(kPointersOfPlain);
    pointers_.assign(loop_.inputs.size() + loop_.outputs.size(), -1);
    size_t used = 0;
    auto keep = [&](size_t k) {
      if (used < registers) pointers_[k] = kPointersOfPlain[used++];
    };
    for (size_t k = 0; k < loop_.inputs.size(); k++)
      if (layout_.vectors >> k & 1) keep(k);
    for (size_t k = 0; k < loop_.outputs.size(); k++) keep(loop_.inputs.size() + k);
    for (size_t r = 0; r < loop_.reductions.size(); r++) {
      const bool in_registers = !loop_.calls && lowest_ + 2 <= kTemporaries + kMaxPinned;
      running_.push_back(in_registers ? lowest_ : -1);
      if (in_registers) lowest_ += 2;
    }
    for (ValueId v : loop_.inputs)
      if (Value& x = value(v); !loop_.calls && is_number(x) && lowest_ < kTemporaries + kMaxPinned) x.reg = lowest_++;
    place_numbers(Value::Home::word);
  }
  // Numbers go to their registers, or, where there are calls, onto the stack for the functions that take them.
  void place_numbers(Value::Home home) {
    for (ValueId v : loop_.inputs) {
      Value& x = value(v);
      if (x.home != home) continue;
      if (pinned(x)) {
        fetch(x, static_cast<Zmm>(x.reg), 0);
      } else if (goes_into_call(v)) {
        fetch(x, 0, 0);
        for (int block = 0; block < loop_.blocks(); block++) a_.store(vmovups_store, stack(x, block), 0);
      }
    }
  }
  void begin_row() {
    for (size_t k = 0; k < loop_.inputs.size(); k++) {
      if (!(layout_.tables >> k & 1)) continue;
      a_.load(kScratch, pitch(k));
      a_.load(kScratch, Address{kScratch});
      a_.store(pointer(k), kScratch);
      a_.load(kScratch, pitch(k));
      a_.add(kScratch, 8);
      a_.store(pitch(k), kScratch);
    }
    a_.clear(kIndex);
    for (size_t k = 0; k < pointers_.size(); k++)
      if (pointers_[k] >= 0) a_.load(static_cast<Gpr>(pointers_[k]), pointer(k));
    for (size_t r = 0; r < loop_.reductions.size(); r++)
      for (int half = 0; half < 2; half++) {
        const Zmm lanes = static_cast<Zmm>(running_[r] >= 0 ? running_[r] + half : 0);
        a_.v(vbroadcastss, lanes, 0, identity(r));
        keep_running(r, half, lanes);
      }
    place_numbers(Value::Home::one);
  }
  void end_row() {
    const size_t others = loop_.inputs.size() + loop_.outputs.size();
    for (size_t r = 0; r < loop_.reductions.size(); r++)
      for (int half = 0; half < 2; half++) {
        const Zmm lanes = running(r, half, 0);
        a_.load(kScratch, pointer(others + r));
        a_.store(vmovups_store, {kScratch, rsp, 1, 64 * half}, lanes);
      }
    for (size_t k = 0; k < pointers(); k++) {
      if (k < loop_.inputs.size() && (layout_.tables >> k & 1 || value(loop_.inputs[k]).home == Value::Home::word))
        continue;
      a_.load(kScratch, pitch(k));
      a_.add(pointer(k), kScratch);
    }
  }
  bool goes_into_call(ValueId v) const {
    for (size_t s = 0; s < loop_.steps.size(); s++)
      if (is_call(s) && std::ranges::find(step_of(s).in, v) != std::end(step_of(s).in)) return true;
    return false;
  }

  // What lanes of a reduction start with.
  static Address identity(size_t r) { return in_code(4 * (kWords + static_cast<int>(r))); }
  // Running lanes of a reduction: their register, or the temporary into which they are fetched.
  Zmm running(size_t r, int half, Zmm temporary) {
    if (running_[r] >= 0) return static_cast<Zmm>(running_[r] + half);
    a_.v(vmovups, temporary, 0, running_stack(r, half));
    return temporary;
  }
  void keep_running(size_t r, int half, Zmm lanes) {
    if (running_[r] < 0) a_.store(vmovups_store, running_stack(r, half), lanes);
  }
  Address running_stack(size_t r, int half) const {
    return {
        rsp, rsp, 1,
        64 * (static_cast<int>(loop_.blocks() * static_cast<int64_t>(values_.size()) + 2 * static_cast<int64_t>(r)) +
              half)};
  }
  // The blocks of a value lie one after the other.
  Address stack(const Value& x, int block) const {
    return {rsp, rsp, 1, 64 * (static_cast<int>(&x - values_.data()) * static_cast<int>(loop_.blocks()) + block)};
  }
  Address lanes_at(int pointer_index, int block, int size = 4) {
    int base = pointers_[static_cast<size_t>(pointer_index)];
    if (base < 0) a_.load(static_cast<Gpr>(base = kScratch), pointer(static_cast<size_t>(pointer_index)));
    return {static_cast<Gpr>(base), kIndex, static_cast<uint8_t>(size), 16 * size * block};
  }
  // The mask of an access to memory: in the last turn, of the lanes that are left.
  Mask choose(int block) {
    if (!rest_) return 0;
    a_.load_mask(kRest, argument(Loop::kMasks + block));
    return kRest;
  }

  void fetch(const Value& x, Zmm to, int block) {
    switch (x.home) {
      case Value::Home::word:
        return a_.v(vbroadcastss, to, 0, in_code(x.at));
      case Value::Home::one:
        a_.load(kScratch, pointer(static_cast<size_t>(x.at)));
        return a_.v(vbroadcastss, to, 0, Address{kScratch});
      case Value::Home::vector: {
        const Address m = lanes_at(x.at, block);
        const Mask mask = choose(block);
        return a_.v(vmovups, to, 0, m, mask, mask);
      }
      case Value::Home::narrow: {
        const Address m = lanes_at(x.at, block, static_cast<int>(size_of(x.dtype)));
        const Mask mask = choose(block);
        return load_narrow(a_, x.dtype, to, m, mask);
      }
      case Value::Home::none:
        return a_.v(vmovups, to, 0, stack(x, block));
    }
  }
  void put_on_stack(Value& x) {
    if (x.home != Value::Home::none || x.stored) return;
    x.stored = true;
    a_.store(vmovups_store, stack(x, block_), static_cast<Zmm>(x.reg));
  }

  // The same in all blocks.
  static bool is_number(const Value& x) { return x.home == Value::Home::one || x.home == Value::Home::word; }
  bool pinned(const Value& x) const { return x.reg >= kTemporaries && x.reg < lowest_; }
  void drop(Value& x) {
    if (x.reg < 0 || pinned(x)) return;
    owner_[static_cast<size_t>(x.reg)] = nullptr;
    x.reg = -1;
  }
  // A register; of values that are not needed now, the one that is needed last makes room.
  int take(Value& x) {
    int best = -1;
    for (int r = lowest_; r < kRegisters; r++) {
      Value* owner = owner_[static_cast<size_t>(r)];
      if (!owner) {
        best = r;
        break;
      }
      if (std::find(held_.begin(), held_.end(), owner) != held_.end()) continue;
      if (best < 0 || owner->next > owner_[static_cast<size_t>(best)]->next) best = r;
    }
    if (Value* owner = owner_[static_cast<size_t>(best)]) {
      if (owner->next != kNever) put_on_stack(*owner);
      drop(*owner);
    }
    owner_[static_cast<size_t>(best)] = &x;
    return x.reg = best;
  }
  Zmm need(Value& x) {
    if (x.reg < 0) {
      take(x);
      fetch(x, static_cast<Zmm>(x.reg), block_);
    }
    return static_cast<Zmm>(x.reg);
  }

  // Gives all NaNs of a register the bits of the one that arithmetic gives.
  void settle(Value& x) {
    if (!x.loose) return;
    const Zmm r = need(x);
    x86::settle(a_, r);
    x.loose = false;
    x.stored = false;
  }

  // One turn of the loop: all segments, each for all blocks.
  void turn(bool rest) {
    rest_ = rest;
    for (Value& x : values_)
      if (x.segment >= 0) x.home = Value::Home::none;
    for (size_t g = 0; g < segments_.size(); g++) {
      const Segment& segment = segments_[g];
      for (block_ = 0; block_ < loop_.blocks(); block_++) {
        for (size_t v = 0; v < values_.size(); v++) {
          Value& x = values_[v];
          if (block_ == 0 || !is_number(x)) drop(x);
          x.loose = false;
          x.next = segment.uses[v];
          if (x.segment == static_cast<int>(g)) {
            x.stored = false;
            x.home = Value::Home::none;
          }
        }
        size_t reduction = reductions_before(segment.first);
        for (size_t s = segment.first; s <= segment.last; s++) {
          const Step& step = step_of(s);
          if (step.kind == Step::Kind::reduce)
            reduce(step, segment.next[s - segment.first], reduction++);
          else if (!is_call(s))
            map(step, segment.next[s - segment.first]);
        }
      }
      if (segment.call) call(step_of(segment.last));
    }
  }
  size_t reductions_before(size_t s) const {
    return static_cast<size_t>(std::count_if(loop_.steps.begin(), loop_.steps.begin() + static_cast<ptrdiff_t>(s),
                                             [&](uint16_t i) { return !is_map(i); }));
  }

  void used(const Step& step, const std::array<int, 3>& next) {
    for (size_t k = 0; k < 3; k++)
      if (step.in[k] != TileProgram::kNone) {
        Value& x = value(step.in[k]);
        x.next = next[k];
        if (x.next == kNever && !is_number(x)) drop(x);
      }
  }

  void map(const Step& step, const std::array<int, 3>& next) {
    const Recipe& how = recipe_of(step.op);
    Zmm in[3] = {};
    held_.clear();
    bool loose = how.loose == Recipe::gives;
    for (size_t k = 0; k < 3 && step.in[k] != TileProgram::kNone; k++) {
      Value& x = value(step.in[k]);
      if (how.loose == Recipe::exact) settle(x);
      loose |= how.loose == Recipe::follows && x.loose;
      in[k] = need(x);
      held_.push_back(&x);
    }
    Value& out = value(step.out);
    used(step, next);
    take(out);
    write(a_, step.op, static_cast<Zmm>(out.reg), in);
    held_.clear();
    out.loose = loose;
    if (out.kept || !out.outputs.empty()) settle(out);
    for (int k : out.outputs) put(out, static_cast<Zmm>(out.reg), k);
    if (out.kept) put_on_stack(out);
    if (out.next == kNever) drop(out);
  }

  // Writes a block of an output. Lanes that are in memory are found there again.
  void put(Value& x, Zmm lanes, int k) {
    if (!layout_.is_narrow(static_cast<size_t>(k))) {
      const Address m = lanes_at(k, block_);
      a_.store(vmovups_store, m, lanes, choose(block_));
      x.home = Value::Home::vector;
      x.at = k;
      return;
    }
    const Dtype dtype = narrow_type(k);
    const Address m = lanes_at(k, block_, static_cast<int>(size_of(dtype)));
    const Mask mask = choose(block_);
    store_narrow(a_, dtype, m, lanes, mask);
  }
  Dtype narrow_type(int k) const {
    const Loop::Output& output = loop_.outputs[static_cast<size_t>(k) - loop_.inputs.size()];
    return program_.accesses()[program_.steps()[output.store].access].dtype;
  }

  // A function of all blocks. What it takes and gives lies in memory, block after block.
  void call(const Step& step) {
    constexpr Gpr kIn[] = {rsi, rdx, rcx};
    for (size_t k = 0; k < 3 && step.in[k] != TileProgram::kNone; k++) {
      Value& x = value(step.in[k]);
      const bool in_memory = x.home == Value::Home::vector && !rest_;
      if (x.home == Value::Home::narrow || (x.home == Value::Home::vector && rest_))
        for (int block = 0; block < loop_.blocks(); block++) {
          fetch(x, 0, block);
          a_.store(vmovups_store, stack(x, block), 0);
        }
      a_.load_address(kIn[k], in_memory ? lanes_at(x.at, 0) : stack(x, 0));
    }
    Value& out = value(step.out);
    const auto lanes =
        std::ranges::find_if(out.outputs, [&](int k) { return !layout_.is_narrow(static_cast<size_t>(k)); });
    const bool in_place = !rest_ && lanes != out.outputs.end();
    a_.load_address(rdi, in_place ? lanes_at(*lanes, 0) : stack(out, 0));
    a_.call(lane_kernels().call[static_cast<size_t>(step.op)]);
    for (int k : out.outputs)
      for (block_ = 0; block_ < loop_.blocks() && !(in_place && k == *lanes); block_++) {
        a_.v(vmovups, 1, 0, in_place ? lanes_at(*lanes, block_) : stack(out, block_));
        put(out, 1, k);
      }
    if (in_place) {
      out.home = Value::Home::vector;
      out.at = *lanes;
    }
  }

  void reduce(const Step& step, const std::array<int, 3>& next, size_t r) {
    Value& x = value(step.in[0]);
    held_.assign(1, &x);
    Zmm lanes = need(x);
    if (rest_) {
      a_.v(vbroadcastss, 1, 0, identity(r));
      a_.v(vmovups, 1, 0, lanes, choose(block_));
      lanes = 1;
    }
    const Zmm to = running(r, block_ % 2, 2);
    write(a_, reduction(step.op).combine, to, {to, lanes, 0});
    keep_running(r, block_ % 2, to);
    held_.clear();
    used(step, next);
  }

  const TileProgram& program_;
  const Loop& loop_;
  const Loop::Layout& layout_;
  Assembler a_;
  std::vector<uint16_t> local_;  // number of a value among values_: inputs first
  std::vector<Value> values_;
  std::vector<Segment> segments_;
  std::vector<int> pointers_;  // the register of an address, or -1
  std::vector<int> running_;   // of each reduction: the first of two registers, or -1: on the stack
  std::array<Value*, kRegisters> owner_{};
  std::vector<const Value*> held_;  // by the step that is being written
  bool rest_ = false;
  int block_ = 0, lowest_ = kTemporaries;
};

}  // namespace

LoopCode emit(const TileProgram& program, const Loop& loop, const Loop::Layout& layout) {
  return Emitter(program, loop, layout).emit();
}

}  // namespace neuron
