// Writes the machine code of a loop. Values of one turn of the loop live in registers; a value that finds none is put
// on the stack and fetched again. What is one for all lanes keeps its register, unless operations are called: calls
// keep no registers.
//
// Of NaNs, arithmetic gives one (see one_nan in simd/lanes.cpp). Inside a loop any NaN stands for it as long as nobody
// looks at its bits: such values are `loose`, and settled before a store or an operation that hands on bits.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "../simd/lanes.h"
#include "../tile_program.h"
#include "assembler.h"
#include "loop.h"

namespace neuron {

namespace {

using namespace x86;
using Step = TileProgram::Step;

// ---- how operations are written ------------------------------------------------------------------------------------
enum class Form : uint8_t {
  none,    // neither an instruction nor a function
  call,    // a function of simd/lanes.cpp
  binary,  // one instruction of two inputs
  merged,  // two instructions: the second one's inputs are the first one's result and c, in this order or swapped
  swapped,
  compare,  // of floats by vcmpps, of integers by vpcmpd; `detail` is the predicate
  icompare,
  extreme,  // vmaxps or vminps, where a NaN in input `detail` is handed on or ignored
  unary,    // one instruction of one input
  rounding,
  other,  // by its own lines
};
struct Recipe {
  Form form = Form::call;
  Op op{}, second{};
  uint8_t detail = 0;
  // Whether inputs may be loose, and whether the result is: always, or if an input is.
  enum Loose : uint8_t { exact, takes, follows, gives } loose = exact;
};

constexpr uint8_t kEqual = 0, kUnordered = 3, kNotEqual = 4;  // predicates of vcmpps

// clang-format off
constexpr Recipe recipe(LaneOp op) {
  using enum LaneOp;
  using enum Form;
  constexpr auto gives = Recipe::gives, takes = Recipe::takes, follows = Recipe::follows, exact = Recipe::exact;
  switch (op) {
    case add: return {binary, vaddps, {}, 0, gives};
    case sub: return {binary, vsubps, {}, 0, gives};
    case mul: return {binary, vmulps, {}, 0, gives};
    case div: return {binary, vdivps, {}, 0, gives};
    case iadd: return {binary, vpaddd};
    case isub: return {binary, vpsubd};
    case imul: return {binary, vpmulld};
    case imaximum: return {binary, vpmaxsd};
    case iminimum: return {binary, vpminsd};
    case iand: return {binary, vpandd};
    case ior: return {binary, vpord};
    case ixor: return {binary, vpxord};
    case mul_add: return {merged, vmulps, vaddps, 0, gives};
    case mul_sub: return {merged, vmulps, vsubps, 0, gives};
    case mul_rsub: return {swapped, vmulps, vsubps, 0, gives};
    case mul_mul: return {merged, vmulps, vmulps, 0, gives};
    case add_mul: return {merged, vaddps, vmulps, 0, gives};
    case add_add: return {merged, vaddps, vaddps, 0, gives};
    case sub_mul: return {merged, vsubps, vmulps, 0, gives};
    case sub_add: return {merged, vsubps, vaddps, 0, gives};
    case div_add: return {swapped, vaddps, vdivps, 0, gives};
    case eq: return {compare, {}, {}, kEqual, takes};
    case ne: return {compare, {}, {}, kNotEqual, takes};
    case lt: return {compare, {}, {}, 0x11, takes};
    case le: return {compare, {}, {}, 0x12, takes};
    case gt: return {compare, {}, {}, 0x1e, takes};
    case ge: return {compare, {}, {}, 0x1d, takes};
    case ieq: return {icompare, {}, {}, 0};
    case ilt: return {icompare, {}, {}, 1};
    case ile: return {icompare, {}, {}, 2};
    case ine: return {icompare, {}, {}, 4};
    case ige: return {icompare, {}, {}, 5};
    case igt: return {icompare, {}, {}, 6};
    case maximum: return {extreme, vmaxps, {}, 0};
    case minimum: return {extreme, vminps, {}, 0};
    case fmax: return {extreme, vmaxps, {}, 1};
    case fmin: return {extreme, vminps, {}, 1};
    case sqrt: return {unary, vsqrtps};
    case iabs: return {unary, vpabsd};
    case to_float: return {unary, vcvtdq2ps};
    case to_int: return {unary, vcvttps2dq, {}, 0, takes};
    case round: return {rounding, {}, {}, 8};
    case floor: return {rounding, {}, {}, 9};
    case ceil: return {rounding, {}, {}, 10};
    case trunc: return {rounding, {}, {}, 11};
    case abs: return {other, {}, {}, 0, follows};
    case round_bf16: return {other, {}, {}, 0, follows};
    case copy: return {other, {}, {}, 0, follows};
    case isnan: case nonzero: return {other, {}, {}, 0, takes};
    case neg: case rsqrt: case reciprocal: case copysign: case select: case isinf: case ineg: case inot: case iszero:
    case inonzero: case wrap_i8: case wrap_u8: return {other, {}, {}, 0, exact};
    case uniform_bits: return {none};
    default: return {call};
  }
}

// clang-format on
constexpr auto kRecipes = [] {
  std::array<Recipe, kLaneOps> all;
  for (int i = 0; i < kLaneOps; i++) all[static_cast<size_t>(i)] = recipe(static_cast<LaneOp>(i));
  return all;
}();
const Recipe& recipe_of(LaneOp op) { return kRecipes[static_cast<size_t>(op)]; }

// Words that operations need, at the start of the code.
enum Word {
  one_nan,
  sign_bit,
  magnitude_bits,
  one,
  one_float,
  infinity,
  half_less,
  quiet_bit,
  high_half,
  low_byte,
  zero,
  negative_infinity,
  least_integer,
  greatest_integer,
  kWords
};
constexpr uint32_t kWordBits[kWords] = {0x7fc00000, 0x80000000, 0x7fffffff, 1, 0x3f800000, 0x7f800000, 0x7fff,
                                        0x400000,   0xffff0000, 0xff,       0, 0xff800000, 0x80000000, 0x7fffffff};
Word identity(LaneOp reduction) {
  switch (reduction) {
    case LaneOp::amax:
      return negative_infinity;
    case LaneOp::amin:
      return infinity;
    case LaneOp::iamax:
      return least_integer;
    case LaneOp::iamin:
      return greatest_integer;
    default:
      return zero;
  }
}

// ---- registers -----------------------------------------------------------------------------------------------------
constexpr int kTemporaries = 4;  // zmm0 to zmm3: also what functions take and give
constexpr int kRegisters = 32;
constexpr int kMaxPinned = 12;
constexpr Mask kChosen = 1, kRest = 7;  // lanes that an operation chooses; lanes that are left at the end
constexpr Gpr kArguments = rbx, kIndex = r12, kEnd = r13, kScratch = rax;
constexpr Gpr kSaved[] = {rbx, rbp, r12, r13, r14, r15};
constexpr Gpr kPointersOfPlain[] = {r14, r15, rcx, rdx, rsi, rdi, r8, r9, r10, r11};
constexpr size_t kPointersBesideCalls = 2;
constexpr int kNever = std::numeric_limits<int>::max();

struct Value {
  enum class Home : uint8_t { none, vector, one, word } home = Home::none;
  int at = 0;  // pointer, or offset in the code
  int reg = -1, slot = -1;
  int next = kNever;  // the next step that uses it
  int output = -1;    // pointer
  bool loose = false;
};

class Emitter {
 public:
  Emitter(const TileProgram& program, const Loop& loop, uint64_t vectors)
      : program_(program), loop_(loop), local_(program.values().size(), 0) {
    for (uint16_t i : loop.steps) calls_ |= recipe_of(program.steps()[i].op).form == Form::call && is_map(i);
    for (uint32_t w : kWordBits) a_.word(w);
    add_values(vectors);
    find_uses();
  }

  LoopCode emit() {
    const auto entry = static_cast<size_t>(a_.here());
    for (Gpr r : kSaved) a_.push(r);
    a_.move(rbp, rsp);
    // A value may go onto the stack before and after it is settled.
    a_.add(rsp, -64 * 2 * static_cast<int>(values_.size() + loop_.reductions.size()));
    a_.align_down(rsp, 64);
    a_.move(kArguments, rdi);
    a_.load(kEnd, argument(Loop::kWhole));
    a_.clear(kIndex);
    pin();
    const auto width = static_cast<int32_t>(loop_.width());
    a_.test(kEnd);
    const int32_t none = a_.jump_ahead(equal);
    const int32_t top = a_.here();
    for (int block = 0; block * Loop::kLanes < width; block++) turn(block, false);
    a_.add(kIndex, width);
    a_.compare(kIndex, kEnd);
    a_.jump(below, top);
    a_.land(none);
    a_.load(kScratch, argument(Loop::kMasks));
    a_.test(kScratch);
    const int32_t done = a_.jump_ahead(equal);
    for (int block = 0; block * Loop::kLanes < width; block++) turn(block, true);
    a_.land(done);
    for (size_t r = 0; r < loop_.reductions.size(); r++)
      for (int block = 0; block < 2; block++) {
        const Zmm lanes = running(r, block, 0);
        a_.load(kScratch, pointer(loop_.inputs.size() + loop_.outputs.size() + r));
        a_.store(vmovups_store, {kScratch, rsp, 1, 64 * block}, lanes);
      }
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
  static Address word_at(Word w) { return in_code(4 * w); }

  void add_values(uint64_t vectors) {
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
        x.home = vectors >> k & 1 ? Value::Home::vector : Value::Home::one;
        x.at = static_cast<int>(k);
      }
    }
    for (uint16_t i : loop_.steps)
      if (is_map(i)) add(program_.steps()[i].out);
    for (size_t k = 0; k < loop_.outputs.size(); k++)
      value(loop_.outputs[k]).output = static_cast<int>(loop_.inputs.size() + k);
  }

  // next_[step][k]: the step after it that uses its input k.
  void find_uses() {
    first_.assign(values_.size(), kNever);
    next_.resize(loop_.steps.size());
    for (int s = static_cast<int>(loop_.steps.size()) - 1; s >= 0; s--) {
      const Step& step = program_.steps()[loop_.steps[static_cast<size_t>(s)]];
      for (size_t k = 0; k < 3; k++)
        if (step.in[k] != TileProgram::kNone) next_[static_cast<size_t>(s)][k] = first_[local_[step.in[k]]];
      for (ValueId v : step.in)
        if (v != TileProgram::kNone) first_[local_[v]] = s;
    }
  }

  // Registers for what stays in the loop: addresses, numbers, running lanes.
  void pin() {
    size_t registers = calls_ ? kPointersBesideCalls : std::size(kPointersOfPlain);
    pointers_.assign(loop_.inputs.size() + loop_.outputs.size(), -1);
    size_t used = 0;
    auto keep = [&](size_t k) {
      if (used == registers) return;
      pointers_[k] = kPointersOfPlain[used];
      a_.load(kPointersOfPlain[used++], pointer(k));
    };
    for (size_t k = 0; k < loop_.inputs.size(); k++)
      if (value(loop_.inputs[k]).home == Value::Home::vector) keep(k);
    for (size_t k = 0; k < loop_.outputs.size(); k++) keep(loop_.inputs.size() + k);

    for (size_t r = 0; r < loop_.reductions.size(); r++) {
      const bool in_registers = !calls_ && lowest_ + 2 <= kTemporaries + kMaxPinned;
      running_.push_back(in_registers ? lowest_ : -1 - spills_);
      (in_registers ? lowest_ : spills_) += 2;
      const Address start = word_at(identity(program_.steps()[loop_.reductions[r]].op));
      for (int block = 0; block < 2; block++) {
        const Zmm lanes = static_cast<Zmm>(in_registers ? running_[r] + block : 0);
        a_.v(vbroadcastss, lanes, 0, start);
        keep_running(r, block, lanes);
      }
    }
    if (calls_) return;
    for (ValueId v : loop_.inputs) {
      Value& x = value(v);
      if (x.home == Value::Home::vector || lowest_ == kTemporaries + kMaxPinned) continue;
      x.reg = lowest_++;
      fetch(x, static_cast<Zmm>(x.reg), 0, false);
    }
  }

  // Running lanes of a reduction: their register, or the temporary into which they are fetched.
  Zmm running(size_t r, int block, Zmm temporary) {
    if (running_[r] >= 0) return static_cast<Zmm>(running_[r] + block);
    a_.v(vmovups, temporary, 0, stack(-1 - running_[r] + block));
    return temporary;
  }
  void keep_running(size_t r, int block, Zmm lanes) {
    if (running_[r] < 0) a_.store(vmovups_store, stack(-1 - running_[r] + block), lanes);
  }

  static Address stack(int slot) { return {rsp, rsp, 1, 64 * slot}; }
  Address lanes_at(int pointer_index, int block) {
    int base = pointers_[static_cast<size_t>(pointer_index)];
    if (base < 0) a_.load(static_cast<Gpr>(base = kScratch), pointer(static_cast<size_t>(pointer_index)));
    return {static_cast<Gpr>(base), kIndex, 4, 64 * block};
  }
  void choose_rest(int block) { a_.load_mask(kRest, {kArguments, rsp, 1, 8 * (Loop::kMasks + block)}); }

  void fetch(const Value& x, Zmm to, int block, bool rest) {
    switch (x.home) {
      case Value::Home::word:
        return a_.v(vbroadcastss, to, 0, in_code(x.at));
      case Value::Home::one:
        a_.load(kScratch, pointer(static_cast<size_t>(x.at)));
        return a_.v(vbroadcastss, to, 0, Address{kScratch});
      case Value::Home::vector: {
        const Address m = lanes_at(x.at, block);
        if (rest) choose_rest(block);
        return a_.v(vmovups, to, 0, m, rest ? kRest : Mask{0}, rest);
      }
      case Value::Home::none:
        return a_.v(vmovups, to, 0, stack(x.slot));
    }
  }
  void put_on_stack(Value& x) {
    if (x.home != Value::Home::none || x.slot >= 0) return;
    x.slot = spills_++;
    a_.store(vmovups_store, stack(x.slot), static_cast<Zmm>(x.reg));
  }

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
      fetch(x, static_cast<Zmm>(x.reg), block_, rest_);
    }
    return static_cast<Zmm>(x.reg);
  }

  // Gives all NaNs of a register the bits of the one that arithmetic gives.
  void settle(Value& x) {
    if (!x.loose) return;
    const Zmm r = need(x);
    a_.v_immediate(vcmpps, kChosen, r, r, kUnordered);
    a_.v(vbroadcastss, r, 0, word_at(one_nan), kChosen);
    x.loose = false;
    x.slot = -1;
  }

  // One turn of the loop for one register of lanes.
  void turn(int block, bool rest) {
    block_ = block, rest_ = rest;
    spills_turn_ = spills_;
    owner_.fill(nullptr);
    for (size_t v = 0; v < values_.size(); v++) {
      Value& x = values_[v];
      if (!pinned(x)) x.reg = -1;
      x.slot = -1;
      x.loose = false;
      x.next = first_[v];
      if (v >= loop_.inputs.size()) x.home = Value::Home::none;
    }
    size_t reduction = 0;
    for (size_t s = 0; s < loop_.steps.size(); s++) {
      const Step& step = program_.steps()[loop_.steps[s]];
      if (step.kind == Step::Kind::reduce)
        reduce(step, s, reduction++);
      else
        map(step, s);
    }
    spills_ = spills_turn_;
  }

  void used(const Step& step, size_t s) {
    for (size_t k = 0; k < 3; k++)
      if (step.in[k] != TileProgram::kNone) {
        Value& x = value(step.in[k]);
        x.next = next_[s][k];
        if (x.next == kNever) drop(x);
      }
  }

  void map(const Step& step, size_t s) {
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
    if (how.form == Form::call) {
      call(step, s, in);
      take(out);
      a_.v(vmovups, static_cast<Zmm>(out.reg), 0, 0);
    } else {
      used(step, s);
      take(out);
      write(step.op, how, static_cast<Zmm>(out.reg), in);
    }
    held_.clear();
    out.loose = loose;
    if (out.output >= 0) {
      settle(out);
      const Address m = lanes_at(out.output, block_);
      if (rest_) choose_rest(block_);
      a_.store(vmovups_store, m, static_cast<Zmm>(out.reg), rest_ ? kRest : Mask{0});
      out.home = Value::Home::vector;
      out.at = out.output;
    }
    if (out.next == kNever) drop(out);
  }

  void call(const Step& step, size_t s, const Zmm* in) {
    for (Zmm k = 0; k < 3 && step.in[k] != TileProgram::kNone; k++) a_.v(vmovups, k, 0, in[k]);
    used(step, s);
    for (Value& x : values_)
      if (x.reg >= 0) {
        put_on_stack(x);
        drop(x);
      }
    a_.call(lane_kernels().call[static_cast<size_t>(step.op)]);
  }

  void reduce(const Step& step, size_t s, size_t r) {
    Value& x = value(step.in[0]);
    held_.assign(1, &x);
    Zmm lanes = need(x);
    if (rest_) {
      a_.v(vbroadcastss, 1, 0, word_at(identity(step.op)));
      choose_rest(block_);
      a_.v(vmovups, 1, 0, lanes, kRest);
      lanes = 1;
    }
    const Zmm to = running(r, block_, 2);
    const Zmm both[] = {to, lanes};
    const LaneOp op = step.op == LaneOp::sum     ? LaneOp::add
                      : step.op == LaneOp::amax  ? LaneOp::maximum
                      : step.op == LaneOp::amin  ? LaneOp::minimum
                      : step.op == LaneOp::iamax ? LaneOp::imaximum
                                                 : LaneOp::iminimum;
    write(op, recipe_of(op), to, both);
    keep_running(r, block_, to);
    held_.clear();
    used(step, s);
  }

  // `to` may be one of the inputs, so it is written last; zmm0 is free for what comes between.
  void write(LaneOp op, const Recipe& how, Zmm to, const Zmm* in) {
    const Zmm a = in[0], b = in[1], c = in[2];
    auto choice = [&] {  // 1 in the chosen lanes
      a_.v(vpmovm2d, 0, 0, kChosen);
      a_.shift(shift_right, to, 0, 31);
    };
    auto with_word = [&](Op o, Zmm r, Zmm x, Word w) { a_.v(o, r, x, word_at(w), 0, false, true); };
    switch (how.form) {
      case Form::binary:
        return a_.v(how.op, to, a, b);
      case Form::merged:
        a_.v(how.op, 0, a, b);
        return a_.v(how.second, to, 0, c);
      case Form::swapped:
        a_.v(how.op, 0, a, b);
        return a_.v(how.second, to, c, 0);
      case Form::compare:
        a_.v_immediate(vcmpps, kChosen, a, b, how.detail);
        return choice();
      case Form::icompare:
        a_.v_immediate(vpcmpd, kChosen, a, b, how.detail);
        return choice();
      case Form::extreme:
        a_.v(how.op, 0, a, b);
        a_.v_immediate(vcmpps, kChosen, in[how.detail], in[how.detail], kUnordered);
        return a_.v(vblendmps, to, 0, a, kChosen);
      case Form::unary:
        return a_.v(how.op, to, 0, a);
      case Form::rounding:
        return a_.v_immediate(vrndscaleps, to, 0, a, how.detail);
      case Form::other:
        break;
      case Form::call:
      case Form::none:
        return;
    }
    switch (op) {
      case LaneOp::copy:
        return a_.v(vmovups, to, 0, a);
      case LaneOp::neg:
        return with_word(vpxord, to, a, sign_bit);
      case LaneOp::abs:
        return with_word(vpandd, to, a, magnitude_bits);
      case LaneOp::rsqrt:
        a_.v(vsqrtps, 0, 0, a);
        a_.v(vbroadcastss, 1, 0, word_at(one_float));
        return a_.v(vdivps, to, 1, 0);
      case LaneOp::reciprocal:
        a_.v(vbroadcastss, 1, 0, word_at(one_float));
        return a_.v(vdivps, to, 1, a);
      case LaneOp::copysign:  // bit by bit: where the word has a 1, b's, else a's
        a_.v(vbroadcastss, 0, 0, word_at(sign_bit));
        a_.v_immediate(vpternlogd, 0, b, a, 0xca);
        return a_.v(vmovups, to, 0, 0);
      case LaneOp::select:
        a_.v(vptestmd, kChosen, a, a);
        return a_.v(vblendmps, to, c, b, kChosen);
      case LaneOp::isnan:
        a_.v_immediate(vcmpps, kChosen, a, a, kUnordered);
        return choice();
      case LaneOp::isinf:
        with_word(vpandd, 0, a, magnitude_bits);
        a_.v(vbroadcastss, 1, 0, word_at(infinity));
        a_.v_immediate(vpcmpd, kChosen, 0, 1, kEqual);
        return choice();
      case LaneOp::nonzero:
        a_.v(vpxord, 0, 0, 0);
        a_.v_immediate(vcmpps, kChosen, a, 0, kNotEqual);
        return choice();
      case LaneOp::inonzero:
        a_.v(vptestmd, kChosen, a, a);
        return choice();
      case LaneOp::iszero:
        a_.v(vptestnmd, kChosen, a, a);
        return choice();
      case LaneOp::ineg:
        a_.v(vpxord, 0, 0, 0);
        return a_.v(vpsubd, to, 0, a);
      case LaneOp::inot:
        return a_.v_immediate(vpternlogd, to, a, a, 0x55);
      case LaneOp::wrap_i8:
        a_.shift(shift_left, 0, a, 24);
        return a_.shift(shift_right_signed, to, 0, 24);
      case LaneOp::wrap_u8:
        return with_word(vpandd, to, a, low_byte);
      case LaneOp::round_bf16:  // half a unit less one, and one more if the last bit that stays is 1; NaN stays NaN
        a_.shift(shift_right, 0, a, 16);
        with_word(vpandd, 0, 0, one);
        a_.v(vpaddd, 0, 0, a);
        with_word(vpaddd, 0, 0, half_less);
        a_.v_immediate(vcmpps, kChosen, a, a, kUnordered);
        a_.v(vpord, 0, a, word_at(quiet_bit), kChosen, false, true);
        return with_word(vpandd, to, 0, high_half);
      default:
        return;
    }
  }

  const TileProgram& program_;
  const Loop& loop_;
  Assembler a_;
  std::vector<uint16_t> local_;  // number of a value among values_: inputs first
  std::vector<Value> values_;
  std::vector<int> first_;
  std::vector<std::array<int, 3>> next_;
  std::vector<int> pointers_;  // the register of an address, or -1
  std::vector<int> running_;   // of each reduction: the first register, or -1 - the first stack slot
  std::array<Value*, kRegisters> owner_{};
  std::vector<const Value*> held_;  // by the step that is being written
  bool calls_ = false, rest_ = false;
  int block_ = 0, lowest_ = kTemporaries, spills_ = 0, spills_turn_ = 0;
};

}  // namespace

bool has_loop_form(LaneOp op) {
  const Form form = recipe_of(op).form;
  return form == Form::call ? lane_kernels().call[static_cast<size_t>(op)] != nullptr : form != Form::none;
}

LoopCode emit(const TileProgram& program, const Loop& loop, uint64_t vectors) {
  return Emitter(program, loop, vectors).emit();
}

}  // namespace neuron
