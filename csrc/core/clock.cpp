#include "clock.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <optional>
#include <sstream>

namespace neuron {
namespace {

bool two_byte_float(Dtype t) { return t == Dtype::bfloat16 || t == Dtype::float16; }

bool dense(const Access& a) {
  for (int i = a.ndim - 1, first = 1; i >= 1; --i)
    if (a.dims[i].size > 1) {
      if (first && a.dims[i].stride != 1) return false;
      first = 0;
    }
  return true;
}

class Model {
 public:
  Model(const std::vector<Storage>& storages, const Target& target) : storages_(storages), t_(target) {}

  const Cost& cost_of(const Instruction& in) const {
    const std::vector<Cost>& costs = in.spec().costs;
    return *std::find_if(costs.begin(), costs.end() - 1, [&](const Cost& c) {
      if (t_.generation < c.since) return false;
      for (int i = 0; i < static_cast<int>(Condition::count); ++i)
        if (c.conditions >> i & 1 && !holds(static_cast<Condition>(i), in)) return false;
      return true;
    });
  }

  // Cycles the engine is occupied: formula() says the same in words.
  double cycles(const Instruction& in) const {
    const Cost& c = cost_of(in);
    switch (c.model) {
      case CostModel::none:
        return 1;
      case CostModel::elements:
        return c.fixed + std::max(t_.min_cycles, rate(in, c.per_element) * static_cast<double>(elements(in)));
      case CostModel::matmul: {
        const Access &a = in.operand(1).access, &b = in.operand(2).access;
        const double rows = in.perf_mode == PerfMode::double_row ? 2 : 1;
        return c.per_element * std::max(std::min(t_.min_cycles, static_cast<double>(a.free_size()) / rows),
                                        static_cast<double>(b.free_size()) / rows * (strided(in.operand(2)) ? 2 : 1));
      }
      case CostModel::transpose: {
        const Access& a = in.operand(1).access;
        const auto p = static_cast<double>(a.partitions()), f = static_cast<double>(a.free_size());
        return std::max(p, std::min(t_.min_cycles, f));
      }
      case CostModel::gather: {
        const double e = static_cast<double>(std::max<int64_t>(1, in.count)),
                     size = static_cast<double>(size_of(in.operand(1).access.dtype));
        const double speed = ((28 + 4 * e) / (4 * e)) / std::min(4 / size, e);
        return c.fixed + static_cast<double>(in.operand(0).access.free_size()) / speed;
      }
      case CostModel::topk:
        return static_cast<double>(4 * in.count + in.operand(0).access.free_size());
      case CostModel::dma:
        return 0;
    }
    return 0;
  }

  // Nanoseconds on the busiest of the DMA engines, and the engines used.
  double dma(const Instruction& in, int& engines, int64_t& bytes) const {
    const Access& dst = in.operand(0).access;
    const Access& src = in.operands.size() > 1 && in.operand(1).is_tile() ? in.operand(1).access : dst;
    bytes = std::max(dst.elements() * size_of(dst.dtype), src.elements() * size_of(src.dtype));
    // Descriptors: contiguous runs of the side that is cut finer.
    const int64_t run = std::max<int64_t>(1, std::min(run_bytes(dst), run_bytes(src)));
    const int64_t rows = std::max<int64_t>(1, bytes / run);
    // A transfer is spread by on-chip partition, 8 to an engine; between HBM tensors evenly.
    int64_t partitions = 0;
    for (const Access* a : {&dst, &src})
      if (on_chip(storages_[a->storage].memory)) partitions = std::max(partitions, a->partitions());
    const int64_t wanted = partitions ? (partitions + 7) / 8 : std::max(rows, bytes / 512);
    engines = static_cast<int>(std::clamp<int64_t>(wanted, 1, t_.dma_engines));
    const double row = std::max(t_.dma_row_ns, static_cast<double>(run) / t_.dma_bytes_per_ns + t_.dma_row_overhead_ns);
    const double cut = static_cast<double>(bytes) / engines / t_.dma_bytes_per_ns;  // rows may be cut between engines
    return std::max(rows < engines ? t_.dma_row_overhead_ns : static_cast<double>(rows) / engines * row, cut) *
           cost_of(in).per_element;
  }

  int64_t elements(const Instruction& in) const {
    const int input = in.operands.size() > 1 && in.operand(1).is_tile() ? 1 : 0;
    if (in.operands.empty() || !in.operand(input).is_tile()) return 1;
    return std::max(in.operand(input).access.free_size(),
                    in.operand(0).is_tile() ? in.operand(0).access.free_size() : 1);
  }

  int64_t hbm_bytes(const Instruction& in) const {
    int64_t bytes = 0;
    for (const Operand& o : in.operands)
      if (o.is_tile() && !on_chip(memory(o))) bytes += o.access.elements() * size_of(o.access.dtype);
    return bytes;
  }

 private:
  Memory memory(const Operand& o) const { return storages_[o.access.storage].memory; }

  // Whether `test` holds for the tiles from operand `first` on; those that repeat one element do not count.
  template <class Test>
  static bool all_tiles(const Instruction& in, size_t first, Test test) {
    const auto& specs = in.spec().operands;
    for (size_t k = first; k < in.operands.size(); ++k)
      if (in.operands[k].is_tile() && specs[k].role != Role::scalar && !test(in.operands[k])) return false;
    return true;
  }
  static bool all_of_type(const Instruction& in, Dtype type) {
    return all_tiles(in, 0, [&](const Operand& o) { return o.access.dtype == type; });
  }

  bool holds(Condition condition, const Instruction& in) const {
    const auto in_sbuf = [&](const Operand& o) { return memory(o) == Memory::sbuf; };
    switch (condition) {
      case Condition::on_vector:
        return in.engine == Engine::vector;
      case Condition::on_scalar:
        return in.engine == Engine::scalar;
      case Condition::on_gpsimd:
        return in.engine == Engine::gpsimd;
      case Condition::in_sbuf:
        return all_tiles(in, 0, in_sbuf);
      case Condition::inputs_in_sbuf:
        return all_tiles(in, 1, in_sbuf);
      case Condition::psum_input:
        return !all_tiles(in, 1, [&](const Operand& o) { return memory(o) != Memory::psum; });
      case Condition::contiguous:
        return all_tiles(in, 0, [](const Operand& o) { return dense(o.access); });
      case Condition::bf16:
        return all_of_type(in, Dtype::bfloat16);
      case Condition::two_byte:
        return all_tiles(in, 0, [](const Operand& o) { return two_byte_float(o.access.dtype); });
      case Condition::fp32_moving:
        return in.operand(2).access.dtype == Dtype::float32;
      case Condition::transposes:
        return in.transpose;
      case Condition::additive:
        return in.op0 == AluOp::add || in.op0 == AluOp::subtract || in.op0 == AluOp::multiply;
      case Condition::add_or_maximum:
        return in.op0 == AluOp::add || in.op0 == AluOp::maximum;
      case Condition::subtract_multiply:
        return in.op0 == AluOp::subtract && in.op1 == AluOp::multiply && elements(in) % 2 == 0;
      case Condition::rsqrt:
        return in.op0 == AluOp::rsqrt || in.op1 == AluOp::rsqrt;
      case Condition::zero:
        return in.value == 0;
      case Condition::reduces: {
        const auto k = static_cast<size_t>(in.spec().operand_index("reduce_res"));
        return k < in.operands.size() && in.operands[k].is_tile();
      }
      case Condition::sbuf_to_sbuf:
        return all_tiles(in, 0, in_sbuf);
      case Condition::sums_in_sbuf:
        return in_sbuf(in.operand(0)) && (all_of_type(in, Dtype::bfloat16) || all_of_type(in, Dtype::float32));
      case Condition::count:
        break;
    }
    return false;
  }

  bool strided(const Operand& o) const {
    if (!o.is_tile()) return false;
    const Access& a = o.access;
    for (int i = a.ndim - 1; i >= 1; --i)
      if (a.dims[i].size > 1)
        return static_cast<double>(std::abs(a.dims[i].stride) * size_of(a.dtype)) > t_.stride_bytes;
    return false;
  }
  // Cycles per element: where a stride halves the rate of reading and writing, not less than that takes.
  double rate(const Instruction& in, double per_element) const {
    if (std::none_of(in.operands.begin(), in.operands.end(), [&](const Operand& o) { return strided(o); }))
      return per_element;
    double inputs = 0;
    for (size_t k = 1; k < in.operands.size(); ++k)
      inputs += in.operands[k].is_tile() && in.operands[k].access.free_size() > 1 &&
                in.spec().operands[k].role != Role::write;
    return std::max(per_element, 2 * std::min(per_element, std::max(1.0, inputs)));
  }
  int64_t run_bytes(const Access& a) const {
    int64_t run = 1;
    const bool chip = on_chip(storages_[a.storage].memory);
    for (int i = a.ndim - 1; i >= (chip ? 1 : 0); --i) {
      if (a.dims[i].size == 1) continue;
      if (a.dims[i].stride != run) break;
      run *= a.dims[i].size;
    }
    return run * size_of(a.dtype);
  }

  const std::vector<Storage>& storages_;
  const Target& t_;
};

// Trips of a loop that are replayed at least, and events after which the others are extrapolated.
constexpr int64_t kLeastTrips = 8;
constexpr size_t kLoopEvents = 4096;

class Replay {
 public:
  Replay(const Program& program, const Target& target)
      : program_(program),
        storages_(program.storages()),
        target_(target),
        cost_(storages_, target),
        dma_free_(target.dma_engines, Release(0.0, -1)),
        uses_(storages_.size()),
        registers_(program.registers()) {
    last_event_.fill(-1);
  }

  Timeline run() {
    const auto& code = program_.instructions();
    for (position_ = 0; position_ < code.size(); ++position_) {
      const Instruction& in = code[position_];
      switch (in.opcode) {
        case Opcode::loop_begin:
        case Opcode::while_begin:
          begin_loop(in);
          break;
        case Opcode::loop_end:
        case Opcode::while_end:
          end_loop(code[in.match]);
          break;
        case Opcode::register_move: {
          const Known a = value(in.start), b = value(in.stop);
          registers_[in.reg] = a && b ? Known(*a + *b) : std::nullopt;
          break;
        }
        case Opcode::register_load:
          registers_[in.reg] = std::nullopt;
          [[fallthrough]];
        default:
          issue(in);
      }
    }
    out_.busy_ns[static_cast<size_t>(Engine::dma)] = dma_busy_ / target_.dma_engines;
    return std::move(out_);
  }

 private:
  using Known = std::optional<int64_t>;
  using Release = std::pair<double, int32_t>;  // when something is free again, and the event that held it
  struct Use {
    Box box;
    double ready;
    int32_t event;
    bool write;
  };
  struct Hold {  // an instruction of an engine that shares a port
    double begin, end;
    MemorySet memories;
    int32_t event;
  };
  // VectorE takes turns with these engines in these memories.
  static constexpr std::array<std::pair<Engine, MemorySet>, 2> kTurns = {
      {{Engine::gpsimd, kSbuf}, {Engine::scalar, kPsum}}};
  static constexpr size_t kHolds = 64;  // that are remembered per engine
  struct Loop {
    uint32_t begin;
    int64_t trips;  // 0: not known
    size_t first_event, trip_event;
    std::vector<double> ends;  // of the trips
    std::array<double, static_cast<int>(Engine::count)> busy;
    double dma_busy;
  };

  Known value(const Bound& b) const {
    if (b.reg < 0) return b.value;
    return registers_[b.reg] ? Known(*registers_[b.reg] * b.scale + b.value) : std::nullopt;
  }

  void begin_loop(const Instruction& in) {
    int64_t trips = 0;
    if (in.opcode == Opcode::loop_begin) {
      const Known start = value(in.start), stop = value(in.stop);
      registers_[in.reg] = start;
      if (start && stop) {
        trips = (*stop - *start + in.step.value - 1) / in.step.value;
        if (trips <= 0) {
          position_ = in.match;
          return;
        }
      }
    } else if (registers_[in.reg] == 0) {
      position_ = in.match;
      return;
    }
    loops_.push_back({position_, trips, out_.events.size(), out_.events.size(), {}, out_.busy_ns, dma_busy_});
  }

  void end_loop(const Instruction& head) {
    Loop& loop = loops_.back();
    loop.ends.push_back(out_.latency_ns);
    const auto done = static_cast<int64_t>(loop.ends.size());
    const bool counts = head.opcode == Opcode::loop_begin;
    const bool known = counts ? loop.trips > 0 : registers_[head.reg].has_value();
    const bool again = known && (counts ? done < loop.trips : *registers_[head.reg] != 0);
    const bool enough = done >= kLeastTrips && out_.events.size() - loop.first_event >= kLoopEvents;
    if (again && !enough) {
      if (counts) *registers_[head.reg] += head.step.value;
      loop.trip_event = out_.events.size();
      loop.busy = out_.busy_ns;
      loop.dma_busy = dma_busy_;
      position_ = loop.begin;
      return;
    }
    if (again && counts) extrapolate(loop, loop.trips - done);
    if (again || !known) out_.loops.push_back({head.source, loop.trips, done});
    loops_.pop_back();
  }

  // `rest` more trips like the last one, each as long as the later half's on average.
  void extrapolate(const Loop& loop, int64_t rest) {
    const size_t n = loop.ends.size(), half = n / 2;
    const auto more = static_cast<double>(rest);
    const double by = more * (loop.ends[n - 1] - loop.ends[half - 1]) / static_cast<double>(n - half);
    const auto first = static_cast<int32_t>(loop.trip_event);
    for (size_t k = loop.trip_event; k < out_.events.size(); ++k) out_.events[k].times *= 1 + rest;
    for (size_t e = 0; e < out_.busy_ns.size(); ++e) {
      out_.busy_ns[e] += more * (out_.busy_ns[e] - loop.busy[e]);
      if (last_event_[e] >= first) free_at_[e] += by;
    }
    dma_busy_ += more * (dma_busy_ - loop.dma_busy);
    for (Release& r : dma_free_)
      if (r.second >= first) r.first += by;
    if (hbm_free_.second >= first) hbm_free_.first += by;
    for (auto& list : uses_)
      for (Use& u : list)
        if (u.event >= first) u.ready += by;
    for (auto& list : holds_)
      for (Hold& h : list)
        if (h.event >= first) {
          h.begin += by;
          h.end += by;
        }
    pe_idle_since_ += by;
    out_.latency_ns += by;
    registers_[program_.instructions()[loop.begin].reg] = std::nullopt;
  }

  // The first time from `start` on at which no other engine holds what `in` needs of SBUF and PSUM for so long.
  double turn(const Instruction& in, double start, double busy, int32_t& waits_for) const {
    if (!target_.shared_ports) return start;
    for (bool moved = true; moved;) {
      moved = false;
      for (const auto& [engine, memory] : kTurns)
        if (in.engine == engine || in.engine == Engine::vector)
          for (const Hold& h : holds_[static_cast<size_t>(in.engine == engine ? Engine::vector : engine)])
            if (h.memories & memory && touches(in) & memory && h.begin < start + busy && start < h.end) {
              start = h.end;
              waits_for = h.event;
              moved = true;
            }
    }
    return start;
  }
  MemorySet touches(const Instruction& in) const {
    MemorySet set = 0;
    for (const Operand& o : in.operands)
      if (o.is_tile()) set |= 1 << static_cast<int>(storages_[o.access.storage].memory);
    return set;
  }

  // Where registers say, as far as they are known.
  Box box_of(const Access& a) const {
    if (a.reg < 0 || a.indexing != Access::Indexing::none || !registers_[a.reg])
      return bounding_box(storages_[a.storage], a);
    Access here = a;
    here.offset += *registers_[a.reg] * a.reg_stride;
    here.reg = -1;
    return bounding_box(storages_[a.storage], here);
  }

  void issue(const Instruction& in);

  const Program& program_;
  const std::vector<Storage>& storages_;
  const Target& target_;
  const Model cost_;
  Timeline out_;
  std::array<double, static_cast<int>(Engine::count)> free_at_{};  // in-order engines
  std::array<int32_t, static_cast<int>(Engine::count)> last_event_{};
  std::vector<Release> dma_free_;
  Release hbm_free_{0.0, -1};
  double dma_busy_ = 0, pe_idle_since_ = 0;
  std::array<std::deque<Hold>, static_cast<int>(Engine::count)> holds_;
  std::vector<std::vector<Use>> uses_;
  std::vector<Known> registers_;
  std::vector<Loop> loops_;
  uint32_t position_ = 0;
};

void Replay::issue(const Instruction& in) {
  const InstructionSpec& sp = in.spec();
  if (in.operands.empty()) return;
  const bool dma = sp.costs.back().model == CostModel::dma;
  const auto engine = dma ? Engine::dma : in.engine;
  const auto e = static_cast<size_t>(engine);

  // Data dependencies: reads wait for writes, writes for reads and writes, of overlapping boxes.
  double ready = 0;
  int32_t waits = -1;
  bool cross = false;
  std::vector<std::pair<const Access*, bool>> touched;
  for (size_t k = 0; k < in.operands.size(); ++k) {
    const Operand& o = in.operands[k];
    if (!o.is_tile()) continue;
    const bool write = sp.operands[k].role == Role::write || sp.operands[k].role == Role::read_write;
    touched.emplace_back(&o.access, write);
    if (o.access.index) touched.emplace_back(o.access.index.get(), false);
  }
  for (auto [a, write] : touched) {
    const Box box = box_of(*a);
    for (const Use& u : uses_[a->storage])
      if ((write || u.write) && u.ready > ready && u.box.overlaps(box)) {
        ready = u.ready;
        waits = u.event;
        cross = out_.events[u.event].engine != engine;
      }
  }
  Event event{position_, engine, 0, 0, 0, 0, 0, 0, waits, 1};
  if (dma) {
    int engines = 1;
    event.busy_ns = cost_.dma(in, engines, event.bytes);
    event.hbm_bytes = cost_.hbm_bytes(in);
    // The least busy engines take it; HBM's share of the core is a limit too.
    std::partial_sort(dma_free_.begin(), dma_free_.begin() + engines, dma_free_.end());
    const double start = ready + target_.dma_start_ns;
    const auto id = static_cast<int32_t>(out_.events.size());
    const bool shares = event.hbm_bytes > 0 && target_.hbm_bytes_per_ns > 0;
    const Release last = shares ? std::max(dma_free_[engines - 1], hbm_free_) : dma_free_[engines - 1];
    if (last.first > start) event.waits_for = last.second;
    double end = 0;
    for (int k = 0; k < engines; ++k) {
      dma_free_[k] = {std::max(start, dma_free_[k].first) + event.busy_ns, id};
      end = std::max(end, dma_free_[k].first);
    }
    dma_busy_ += event.busy_ns * engines;
    if (shares) {
      const double needed = static_cast<double>(event.hbm_bytes) / target_.hbm_bytes_per_ns;
      hbm_free_ = {std::max(hbm_free_.first, start) + needed, id};
      end = std::max(end, hbm_free_.first);
    }
    event.start_ns = std::max(start, end - event.busy_ns);
    event.end_ns = end;
  } else {
    const double ghz = target_.clock_ghz[e] > 0 ? target_.clock_ghz[e] : 1;
    double start = cross ? ready + target_.instruction_ns : ready;
    if (free_at_[e] >= start) {
      start = free_at_[e];
      if (last_event_[e] >= 0) event.waits_for = last_event_[e];
    }
    event.busy_ns = cost_.cycles(in) / ghz;
    start = turn(in, start, event.busy_ns, event.waits_for);
    if (engine == Engine::tensor && target_.pe_warm_ns > 0) {
      // After idling the array starts at half its rate and ramps up.
      if (start - free_at_[e] > target_.pe_warm_ns || out_.events.empty()) pe_idle_since_ = start;
      const double cold = std::max(0.0, pe_idle_since_ + target_.pe_warm_ns - start);
      event.busy_ns += std::min(event.busy_ns, cold / 2);
    }
    event.start_ns = start;
    event.end_ns = start + event.busy_ns;
    free_at_[e] = event.end_ns;
    if (target_.shared_ports) {
      auto& list = holds_[e];
      list.push_back({start, event.end_ns, touches(in), static_cast<int32_t>(out_.events.size())});
      if (list.size() > kHolds) list.pop_front();
    }
    out_.busy_ns[e] += event.busy_ns;
    if (in.opcode == Opcode::nc_matmul || in.opcode == Opcode::nc_matmul_mx) {
      const Access &a = in.operand(1).access, &b = in.operand(2).access;
      const double lanes = in.opcode == Opcode::nc_matmul_mx ? 4 : 1;
      const double rows = in.perf_mode == PerfMode::double_row ? 2 : 1;
      event.flops = 2.0 * static_cast<double>(a.partitions()) * lanes * static_cast<double>(a.free_size()) *
                    static_cast<double>(b.free_size()) / rows;
    }
  }
  const auto id = static_cast<int32_t>(out_.events.size());
  const double visible =
      dma ? event.end_ns : event.end_ns + target_.access_cycles / std::max(0.5, target_.clock_ghz[e]);
  for (auto [a, write] : touched) {
    auto& list = uses_[a->storage];
    const Box box = box_of(*a);
    if (write)  // what it covers no later access can see
      std::erase_if(list, [&](const Use& u) {
        return u.box.partition_begin >= box.partition_begin && u.box.partition_end <= box.partition_end &&
               u.box.begin >= box.begin && u.box.end <= box.end;
      });
    if (list.size() > 256) list.erase(list.begin(), list.begin() + 128);
    list.push_back({box, visible, id, write});
  }
  last_event_[e] = id;
  out_.latency_ns = std::max(out_.latency_ns, event.end_ns);
  out_.events.push_back(event);
}

}  // namespace

Timeline predict(const Program& program, const Target& target) { return Replay(program, target).run(); }

std::string formula(const Cost& cost, const Target& target) {
  std::ostringstream text;
  text.precision(3);
  const auto times = [&](std::string_view what) {
    if (cost.per_element != 1) text << cost.per_element << ' ';
    text << what;
  };
  switch (cost.model) {
    case CostModel::none:
      text << "1; loops, moves and allocations: 0";
      break;
    case CostModel::elements:
      text << "max(" << target.min_cycles << ", ";
      times("N)");
      if (cost.fixed != 0) text << " + " << cost.fixed;
      break;
    case CostModel::matmul:
      times("max(min(");
      text << target.min_cycles << ", S), M), S and M elements of a stationary and a moving row (double_row: half)";
      break;
    case CostModel::transpose:
      text << "max(P, min(" << target.min_cycles << ", N)), P partitions of data";
      break;
    case CostModel::gather:
      text << cost.fixed
           << " + n / (((28 + 4 e) / 4 e) / min(4 / bytes of an element, e)), n elements of a row of dst, "
           << "e = num_elem_per_idx";
      break;
    case CostModel::topk:
      text << "4 n + K, K elements of a row of val_dst";
      break;
    case CostModel::dma:
      times("DMA");
      break;
  }
  return text.str();
}

std::span<const std::string_view> clock_rules() {
  static constexpr std::array<std::string_view, 6> kRules = {
      "N: elements per partition of the first input or of the result, whichever is more.",
      "DMA: the time of the DMA engines that share the transfer, one for 8 partitions on chip, 16 at most. A "
      "contiguous "
      "row takes max(dma_row_ns, bytes / dma_bytes_per_ns + dma_row_overhead_ns) of its engine; it starts dma_start_ns "
      "after what it waits for, and all transfers together have hbm_bytes_per_ns.",
      "An innermost stride of more than stride_bytes doubles the time of reading and writing: one cycle per element, "
      "two where an instruction of two inputs takes two; matmul: of M.",
      "An instruction starts access_cycles after the end of one that it depends on, and instruction_ns later if that "
      "ran on another engine.",
      "shared_ports: VectorE and GpSimdE take turns in SBUF, VectorE and ScalarE in PSUM.",
      "TensorE runs at half its rate for pe_warm_ns after idling.",
  };
  return kRules;
}

}  // namespace neuron
