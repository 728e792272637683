#include "row_steps.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "program.h"
#include "simd/kernels.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace neuron {
namespace {

using Place = RowOperand::Place;
using Kind = RowStep::Kind;

constexpr int64_t kLargeBytes = 16 << 20;  // half of a last-level cache of the usual 32 MiB
constexpr int64_t kLargeRow = 256;         // elements: a shorter row's stores do not fill lines well

const Kernels& K() { return kernels(); }
template <class E>
int index(E e) {
  return static_cast<int>(e);
}

// Bytes between the elements of a row; nothing if they are not evenly spaced.
std::optional<int64_t> spacing(const Access& a) {
  int64_t stride = 0, size = 1;
  for (int i = 1; i < a.ndim; ++i) {
    const Dim& d = a.dims[i];
    if (d.size == 1) continue;
    if (size > 1 && stride != d.stride * d.size) return std::nullopt;
    stride = d.stride;
    size *= d.size;
  }
  return (size > 1 ? stride : 1) * size_of(a.dtype);
}

class Lowering {
 public:
  Lowering(const std::vector<Storage>& storages, const Instruction& in) : storages_(storages), in_(in) {}

  // First what is done once in a row, then what goes through it in chunks, at last what is done once again: lines hold
  // one chunk.
  std::optional<std::vector<RowStep>> run() {
    for (const Operand& o : in_.operands) {
      if (o.kind == Operand::Kind::reg) return std::nullopt;
      if (o.is_tile() && (!spacing(o.access) || !K().load[index(o.access.dtype)])) return std::nullopt;
    }
    if (in_.operands.empty() || !in_.operand(0).is_tile()) return std::nullopt;
    n_ = in_.operand(0).access.free_size();
    if (!lower()) return std::nullopt;
    return std::move(steps_);
  }

 private:
  bool tile(int i) const { return in_.operand(i).is_tile(); }
  bool has(int i) const { return in_.operand(i).kind != Operand::Kind::none; }

  RowOperand memory(int i) const {
    const Access& a = in_.operand(i).access;
    const Storage& s = storages_[a.storage];
    const int64_t item = size_of(a.dtype);
    RowOperand o;
    o.place = Place::memory;
    o.storage = a.storage;
    o.stride = *spacing(a);
    if (on_chip(s.memory)) {
      const int64_t row = s.row_bytes / item;
      o.partition = a.offset / row;
      o.offset = a.offset % row * item;
    } else {
      o.offset = a.offset * item;
      o.pitch = a.dims[0].stride * item;
    }
    return o;
  }
  RowOperand line() {
    RowOperand o;
    o.place = Place::line;
    o.storage = lines_++;
    o.stride = sizeof(float);
    return o;
  }
  static RowOperand number(float v) {
    RowOperand o;
    o.place = Place::number;
    o.one = true;
    o.number = v;
    return o;
  }
  static bool is_float_row(Dtype t, const RowOperand& o) { return t == Dtype::float32 && o.stride == sizeof(float); }

  // An input as fp32: where it lies, or loaded into a line first.
  RowOperand input(int i, int64_t n, bool whole = false) {
    const Dtype t = in_.operand(i).access.dtype;
    const RowOperand from = memory(i);
    if (is_float_row(t, from)) return from;
    RowStep& s = step(Kind::load, n, whole);
    s.dtype = t;
    s.a = from;
    return s.to = line();
  }
  RowOperand scalar(int i, float otherwise = 0) {
    const Operand& o = in_.operand(i);
    if (o.kind == Operand::Kind::immediate) return number(static_cast<float>(o.immediate));
    if (!o.is_tile()) return number(otherwise);
    RowOperand from = memory(i);
    if (o.access.dtype != Dtype::float32) {
      RowStep& s = step(Kind::load, 1);
      s.dtype = o.access.dtype;
      s.a = from;
      from = s.to = line();
    }
    from.one = true;
    return from;
  }
  // Where a result goes before finish() brings it to its place.
  RowOperand output(int i, bool discard = false) {
    const RowOperand to = memory(i);
    return is_float_row(in_.operand(i).access.dtype, to) && !discard ? to : line();
  }
  void finish(int i, int64_t n, const RowOperand& from, bool discard = false, bool whole = false) {
    if (from.place == Place::memory || discard) return;
    RowStep& s = step(Kind::store, n, whole);
    s.dtype = in_.operand(i).access.dtype;
    s.a = from;
    s.to = memory(i);
  }

  RowStep& step(Kind kind, int64_t n, bool whole = false) {
    RowStep& s = steps_.emplace_back();
    s.kind = kind;
    s.n = n;
    s.whole = whole;
    return s;
  }
  void binary(AluOp op, bool reverse, const RowOperand& a, const RowOperand& b, const RowOperand& to) {
    const bool swaps = reverse && info(op).inputs == 2;
    RowStep& s = step(Kind::binary, n_);
    s.op = op;
    s.a = a;
    s.b = b;
    if (swaps) std::swap(s.a, s.b);
    s.to = to;
  }
  void function(Function f, const RowOperand& in, const RowOperand& scale, const RowOperand& bias, float parameter,
                const RowOperand& to) {
    RowStep& s = step(Kind::activate, n_);
    s.function = f;
    s.a = in;
    s.b = scale;
    s.c = bias;
    s.parameter = parameter;
    s.to = to;
  }

  // The accumulation register of the partition: added to, written to operand `result`.
  bool accumulates() const { return in_.reduce_cmd == ReduceCmd::reset_reduce; }
  RowOperand accumulator(Place place) const {
    RowOperand reg;
    reg.place = place;
    reg.one = true;
    reg.partition = first_partition();
    return reg;
  }
  // from: what the last step gave; nobody else sees it if `discard`.
  void accumulate(const RowOperand& reg, AluOp op, const RowOperand& from, bool discard) {
    if (!accumulates()) return;
    if (RowStep& last = steps_.back();
        last.kind == Kind::activate && op == AluOp::add && K().summed[index(last.function)]) {
      last.kind = Kind::summed;
      last.sum = reg;
      last.fresh = true;
      if (discard) last.to = {};
    } else {
      RowStep& s = step(Kind::accumulate, n_);
      s.op = op;
      s.a = from;
      s.to = reg;
      s.fresh = true;
    }
  }
  void write_register(const RowOperand& reg, int result) {
    if (!accumulates() || !tile(result)) return;
    RowStep& s = step(Kind::store, 1);
    s.dtype = in_.operand(result).access.dtype;
    s.a = reg;
    s.to = memory(result);
  }
  int64_t first_partition() const {
    for (const Operand& o : in_.operands)
      if (o.is_tile() && on_chip(storages_[o.access.storage].memory)) {
        const Storage& s = storages_[o.access.storage];
        return s.partition_start + o.access.offset / (s.row_bytes / size_of(o.access.dtype));
      }
    return 0;
  }

  bool lower() {
    const AluClass bitwise = AluClass::bitwise;
    const bool counts = in_.reduce_cmd == ReduceCmd::idle || accumulates();
    switch (in_.opcode) {
      case Opcode::dma_copy:
      case Opcode::tensor_copy: {
        const Access &to = in_.operand(0).access, &from = in_.operand(1).access;
        if (to.partitions() != from.partitions() || to.free_size() != from.free_size()) return false;
        const int64_t item = size_of(to.dtype);
        if (to.dtype == from.dtype) {
          if (*spacing(to) != item || *spacing(from) != item) return false;
          RowStep& s = step(Kind::copy, n_);
          s.dtype = to.dtype;
          s.a = memory(1);
          s.to = memory(0);
          return true;
        }
        // Through fp32; one of the sides may be it.
        const RowOperand x = input(1, n_);
        RowStep& s = step(Kind::store, n_);
        s.dtype = to.dtype;
        s.a = x;
        s.to = memory(0);
        return true;
      }
      case Opcode::tensor_tensor: {
        if (info(in_.op0).cls == bitwise || in_.engine == Engine::gpsimd) return false;
        const RowOperand x = input(1, n_), y = input(2, n_), to = output(0);
        binary(in_.op0, false, x, y, to);
        finish(0, n_, to);
        return true;
      }
      case Opcode::tensor_scalar: {
        if (info(in_.op0).cls == bitwise || info(in_.op1).cls == bitwise) return false;
        const bool second = in_.op1 != AluOp::bypass && (has(3) || info(in_.op1).inputs == 1);
        const RowOperand s = scalar(2), t = second ? scalar(3) : number(0), x = input(1, n_), to = output(0);
        binary(in_.op0, in_.reverse0, x, s, to);
        if (second) binary(in_.op1, in_.reverse1, to, t, to);
        finish(0, n_, to);
        return true;
      }
      case Opcode::scalar_tensor_tensor: {
        const RowOperand s = scalar(2), x = input(1, n_), y = input(3, n_), product = line(), to = output(0);
        binary(in_.op0, in_.reverse0, x, s, product);
        binary(in_.op1, in_.reverse1, product, y, to);
        finish(0, n_, to);
        return true;
      }
      case Opcode::tensor_reduce: {
        if (info(in_.op0).cls == bitwise || in_.op0 == AluOp::average) return false;
        const RowOperand x = input(1, in_.operand(1).access.free_size(), true), to = output(0);
        RowStep& s = step(Kind::reduce, in_.count, true);
        s.op = in_.op0;
        s.count = n_;
        s.negate = in_.negate;
        s.a = x;
        s.to = to;
        finish(0, n_, to, false, true);
        return true;
      }
      case Opcode::activation: {
        if (!counts || (!accumulates() && tile(4))) return false;
        const RowOperand reg = accumulator(Place::scalar_register);
        const RowOperand bias = scalar(2), scale = scalar(3, 1), x = input(1, n_), to = output(0, in_.discard);
        function(in_.function, x, scale, bias, static_cast<float>(in_.value), to);
        accumulate(reg, in_.reduce_op, to, in_.discard);
        finish(0, n_, to, in_.discard);
        write_register(reg, 4);
        return true;
      }
      case Opcode::exponential: {
        if (!counts || (!accumulates() && tile(3))) return false;
        const RowOperand reg = accumulator(Place::vector_register);
        const RowOperand shift = scalar(2), x = input(1, n_), to = output(0, in_.discard);
        binary(AluOp::subtract, false, x, shift, to);
        function(Function::exp, to, number(1), number(0), 0, to);
        accumulate(reg, AluOp::add, to, in_.discard);
        finish(0, n_, to, in_.discard);
        write_register(reg, 3);
        return true;
      }
      case Opcode::tensor_scalar_reduce: {
        if (!accumulates() || in_.negate || info(in_.op0).cls == bitwise) return false;
        const RowOperand reg = accumulator(Place::vector_register);
        const RowOperand s = scalar(2), x = input(1, n_), to = output(0, in_.discard);
        binary(in_.op0, in_.reverse0, x, s, to);
        accumulate(reg, in_.reduce_op, to, in_.discard);
        finish(0, n_, to, in_.discard);
        write_register(reg, 3);
        return true;
      }
      case Opcode::reciprocal: {
        const RowOperand x = input(1, n_), to = output(0);
        function(Function::reciprocal, x, number(1), number(0), 0, to);
        finish(0, n_, to);
        return true;
      }
      default:
        return false;
    }
  }

  const std::vector<Storage>& storages_;
  const Instruction& in_;
  int64_t n_ = 0;
  uint32_t lines_ = 0;
  std::vector<RowStep> steps_;
};

bool single_pass(const RowStep& s) { return s.whole || s.n <= kChunk; }

// May the chunks of one step run between those of the other? Not if one writes what the other one touches elsewhere.
bool interleaves(const RowStep& x, const RowStep& y) {
  auto clash = [](const RowOperand& written, const RowOperand& other) {
    if (written.place != other.place || written.storage != other.storage) return false;
    if (written.place == Place::line) return other.one;  // a number that all chunks need
    return written.place == Place::memory &&
           (written.offset != other.offset || written.one != other.one || written.stride != other.stride);
  };
  for (const RowOperand* o : {&y.to, &y.a, &y.b, &y.c})
    if (clash(x.to, *o)) return false;
  for (const RowOperand* o : {&x.a, &x.b, &x.c})
    if (clash(y.to, *o)) return false;
  return true;
}

// Copies bytes around the caches; asks for the line at the same distance from `ahead` with each one.
void stream(const char* from, char* to, int64_t bytes, const char* ahead) {
#ifdef __SSE2__
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & 63);
  std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    if (ahead) _mm_prefetch(ahead + i, _MM_HINT_T0);
    for (int64_t j = i; j < i + 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
  }
  std::memcpy(to + i, from + i, bytes - i);
#else
  std::memcpy(to, from, bytes);
#endif
}
void end_of_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

void run(const ResolvedStep& s, int64_t r, int64_t at, int64_t n) {
  const RowStep& step = *s.step;
  const auto address = [&](const RowPointer& p) { return p.base + r * p.pitch + at * p.element; };
  const auto floats = [&](const RowPointer& p) { return reinterpret_cast<float*>(address(p)); };
  const Kernels& k = K();
  const bool starts = step.fresh && at == 0;
  switch (step.kind) {
    case Kind::copy:
      std::memmove(address(s.to), address(s.a), n * size_of(step.dtype));
      break;
    case Kind::load:
      k.load[index(step.dtype)](address(s.a), step.a.stride, n, floats(s.to));
      break;
    case Kind::store:
      k.store[index(step.dtype)](floats(s.a), n, address(s.to), step.to.stride);
      break;
    case Kind::binary:
      k.binary[index(step.op)](floats(s.a), !step.a.one, floats(s.b), !step.b.one, floats(s.to), n);
      break;
    case Kind::chain:
      k.chain[index(step.op)][index(step.op2)][step.reversed](floats(s.a), floats(s.b), !step.b.one, floats(s.c),
                                                              !step.c.one, floats(s.to), n);
      break;
    case Kind::chain3:
      k.chain3[index(step.op)][index(step.op2)][index(step.op3)](
          floats(s.a), floats(s.b), !step.b.one, floats(s.c), !step.c.one, floats(s.d), !step.d.one, floats(s.to), n);
      break;
    case Kind::binary_sum: {
      const float v =
          k.binary_sum[index(step.op)][index(step.function)](floats(s.a), floats(s.b), !step.b.one, floats(s.to), n);
      *floats(s.sum) = (starts ? 0.0f : *floats(s.sum)) + v;
      break;
    }
    case Kind::summed: {
      const float v = k.summed[index(step.function)](floats(s.a), *floats(s.b), *floats(s.c),
                                                     step.to.place == Place::none ? nullptr : floats(s.to), n);
      *floats(s.sum) = (starts ? 0.0f : *floats(s.sum)) + v;
      break;
    }
    case Kind::activate:
      activate(step.function, floats(s.a), *floats(s.b), *floats(s.c), step.parameter, floats(s.to), n);
      break;
    case Kind::reduce: {
      const auto f = k.reduce[index(step.op)];
      const float* from = floats(s.a);
      float* to = floats(s.to);
      for (int64_t j = 0; j < step.count; ++j, from += n) {
        const float v = f(from, n);
        to[j] = step.negate ? -v : v;
      }
      break;
    }
    case Kind::accumulate: {
      const float v = k.reduce[index(step.op)](floats(s.a), n);
      float* to = floats(s.to);
      if (starts) *to = static_cast<float>(info(step.op).identity);
      k.binary[index(step.op)](to, 1, &v, 1, to, 1);
      break;
    }
  }
}

// Does one loop over both steps read and write what two loops would? Not if something is at the place of a result, but
// not element by element.
bool passes_together(const RowStep& x, const RowStep& y) {
  auto apart = [](const RowOperand& written, const RowOperand& other) {
    return written.place != other.place || written.storage != other.storage || written == other;
  };
  for (const RowOperand* o : {&x.a, &x.b, &x.c, &x.d})
    if (!apart(x.to, *o) || !apart(y.to, *o)) return false;
  for (const RowOperand* o : {&y.b, &y.c, &y.d})
    if (*o == x.to || !apart(x.to, *o) || !apart(y.to, *o)) return false;
  return apart(y.to, x.to);
}

// The two as one.
std::optional<RowStep> merged(const RowStep& x, RowStep y, bool unread) {
  const bool forwards = (x.kind == Kind::binary && !x.a.one) || (x.kind == Kind::chain && !x.reversed);
  if (!forwards || x.to.one || x.n != y.n || x.whole || y.whole) return std::nullopt;
  RowStep out = x;
  if (y.kind == Kind::binary && y.b == x.to && !(y.a == x.to)) {
    std::swap(y.a, y.b);
    out.reversed = y.op != AluOp::add && y.op != AluOp::multiply;
  }
  if (!(y.a == x.to) || !passes_together(x, y)) return std::nullopt;
  if (y.kind == Kind::binary && (unread || y.to == x.to)) {
    out.to = y.to;
    if (x.kind == Kind::binary && K().chain[index(x.op)][index(y.op)][out.reversed]) {
      out.kind = Kind::chain;
      out.op2 = y.op;
      out.c = y.b;
      return out;
    }
    if (x.kind == Kind::chain && !out.reversed && K().chain3[index(x.op)][index(x.op2)][index(y.op)]) {
      out.kind = Kind::chain3;
      out.op3 = y.op;
      out.d = y.b;
      return out;
    }
  }
  const auto is = [](const RowOperand& o, float v) { return o.place == Place::number && o.number == v; };
  if (x.kind == Kind::binary && y.kind == Kind::summed && y.to.place == Place::none && is(y.b, 1) && is(y.c, 0) &&
      K().binary_sum[index(x.op)][index(y.function)]) {
    out.kind = Kind::binary_sum;
    out.function = y.function;
    out.sum = y.sum;
    out.fresh = y.fresh;
    return out;
  }
  return std::nullopt;
}

// Does no step read a line before it is written again?
bool is_spent(const RowOperand& line, std::span<const RowStep> steps) {
  for (const RowStep& s : steps) {
    for (const RowOperand* o : {&s.a, &s.b, &s.c, &s.d})
      if (*o == line) return false;
    if (s.to == line) break;
  }
  return true;
}

}  // namespace

std::optional<std::vector<RowStep>> row_steps(const std::vector<Storage>& storages, const Instruction& in) {
  return Lowering(storages, in).run();
}

void group_steps(std::span<const RowStep> steps, uint32_t begin, int64_t first, int64_t last,
                 std::vector<RowGroup>& groups, size_t first_group) {
  // An instruction's own chunks stay together, as its lines hold one. (Where its result overlaps an input in another
  // pattern it has no steps: see Instruction::stage.)
  bool apart = groups.size() == first_group;
  if (!apart)
    for (uint32_t i = begin; i < steps.size(); ++i)
      for (uint32_t j = groups.back().begin; j < begin && !single_pass(steps[i]); ++j)
        apart = apart || !interleaves(steps[j], steps[i]);
  for (uint32_t i = begin; i < steps.size(); ++i) {
    const RowStep& s = steps[i];
    const bool one = single_pass(s);
    const RowGroup* g = groups.size() > first_group ? &groups.back() : nullptr;
    const bool joins = g && g->first == first && g->last == last && one == single_pass(steps[g->begin]) &&
                       (one || (g->n == s.n && !(apart && g->begin < begin)));
    if (joins)
      groups.back().end = i + 1;
    else
      groups.push_back({i, i + 1, one ? 1 : s.n, one ? 1 : kChunk, first, last});
  }
}

void merge_row_steps(std::vector<RowStep>& steps, std::vector<RowGroup>& groups,
                     const std::function<bool(uint32_t, uint32_t)>& unread) {
  std::vector<RowStep> kept;
  kept.reserve(steps.size());
  for (RowGroup& g : groups) {
    const auto begin = static_cast<uint32_t>(kept.size());
    for (uint32_t i = g.begin; i < g.end; ++i) {
      const bool follows = kept.size() > begin;
      const RowOperand* result = follows ? &kept.back().to : nullptr;
      const std::span<const RowStep> rest(steps.data() + i + 1, g.end - i - 1);
      const bool gone =
          follows && (result->place == Place::memory ? unread(result->storage, i)
                                                     : result->place == Place::line && is_spent(*result, rest));
      if (auto one = follows ? merged(kept.back(), steps[i], gone) : std::nullopt)
        kept.back() = *one;
      else
        kept.push_back(steps[i]);
    }
    g.begin = begin;
    g.end = static_cast<uint32_t>(kept.size());
  }
  steps = std::move(kept);
}

void stream_results(std::span<RowStep> steps, const std::vector<Storage>& storages) {
  using Operands = std::initializer_list<const RowOperand*>;
  const auto large = [&](const RowOperand& o) {
    if (o.place != Place::memory) return false;
    const Storage& s = storages[o.storage];
    return !on_chip(s.memory) && s.partitions * s.row_bytes >= kLargeBytes;
  };
  const RowOperand* input = nullptr;
  for (const RowStep& s : steps)
    for (const RowOperand* o : Operands{&s.a, &s.b, &s.c, &s.d})
      if (!input && large(*o) && !o->one && o->pitch > 0) input = o;
  for (RowStep& s : steps) {
    const bool bytes = s.kind == RowStep::Kind::store || s.kind == RowStep::Kind::copy;
    if (!large(s.to) || s.to.stride != size_of(bytes ? s.dtype : Dtype::float32) || s.n < kLargeRow || s.whole)
      continue;
    int touched = 0;
    for (const RowStep& other : steps)
      for (const RowOperand* o : Operands{&other.to, &other.a, &other.b, &other.c, &other.d, &other.sum})
        touched += o->place == RowOperand::Place::memory && o->storage == s.to.storage;
    if (touched > 1) continue;
    s.streams = true;
    if (input && input->stride * s.n <= input->pitch) s.ahead = *input;
  }
}

void run_row_steps(std::span<const RowGroup> groups, std::span<const ResolvedStep> resolved, int64_t begin,
                   int64_t end) {
  const uint32_t origin = groups.front().begin;
  bool streams = false;
  for (int64_t p = begin; p < end; ++p)
    for (const RowGroup& g : groups) {
      if (p < g.first || p >= g.last) continue;
      for (int64_t at = 0; at < g.n; at += g.chunk)
        for (uint32_t i = g.begin; i < g.end; ++i) {
          const ResolvedStep& s = resolved[i - origin];
          const int64_t r = p - g.first, n = g.n == 1 ? s.step->n : std::min(g.chunk, g.n - at);
          run(s, r, at, n);
          if (!s.streamed.base) continue;
          const auto address = [&](const RowPointer& p, int64_t row) {
            return p.base + row * p.pitch + at * p.element;
          };
          const bool follows = s.ahead.base && p + 1 < end;
          stream(s.to.base, address(s.streamed, r), n * s.streamed.element,
                 follows ? address(s.ahead, r + 1) : nullptr);
          streams = true;
        }
    }
  if (streams) end_of_streams();
}

void activate(Function function, const float* in, float scale, float bias, float parameter, float* out, int64_t n) {
  if (scale == 1.0f && bias != 0.0f) {
    K().binary[index(AluOp::add)](in, 1, &bias, 0, out, n);
    in = out;
  } else if (scale != 1.0f) {
    K().affine(in, scale, bias, out, n);
    in = out;
  }
  K().function[index(function)](in, parameter, out, n);
}

}  // namespace neuron
