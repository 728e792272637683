// A program: buffers and the instructions of one NeuronCore. Built in microseconds, validated as it is built.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "isa.h"
#include "plan.h"
#include "races.h"

namespace neuron {

inline constexpr int kMaxDims = 6;
inline constexpr int64_t kMostElements = int64_t{1} << 56;  // of an offset or a dimension's extent: bytes fit

struct Storage {
  std::string name;
  Memory memory = Memory::sbuf;
  int64_t partitions = 1;  // 1 in HBM
  int64_t row_bytes = 0;   // bytes per partition; in HBM all bytes
  int64_t address = -1;    // byte offset within the partition, when the kernel chose it
  int64_t partition_start = 0;
  bool external = false;  // given by the caller: initialised, and its memory is the caller's
  uint32_t source = 0;    // where the kernel allocated it
};

struct Dim {
  int64_t stride;  // elements
  int64_t size;
  bool operator==(const Dim&) const = default;
};

// What is read or written of a buffer. On chip dims[0] runs over partitions, and offset and strides count through rows
// of row_bytes; in HBM addresses are linear.
struct Access {
  enum class Indexing : uint8_t { none, rows, elements };

  uint32_t storage = 0;
  Dtype dtype = Dtype::float32;
  int ndim = 0;
  int64_t offset = 0;  // elements of dtype
  std::array<Dim, kMaxDims> dims{};
  int reg = -1;  // adds register * reg_stride elements
  int64_t reg_stride = 0;
  int64_t reg_low = INT64_MIN, reg_high = INT64_MAX;  // what it may add to stay in the dimensions that it indexes
  // rows: step i of dims[0] starts at index[i] * index_stride, index read column by column.
  // elements: free element i of a partition is at index[i % group, i / group] of its group of partitions.
  Indexing indexing = Indexing::none;
  int64_t index_stride = 0;
  int64_t index_limit = 0;  // indices in [0, index_limit)
  std::shared_ptr<const Access> index;

  int64_t elements() const;
  int64_t partitions() const { return dims[0].size; }
  int64_t free_size() const;
  bool is_dynamic() const { return reg >= 0 || indexing != Indexing::none; }
};

struct Operand {
  enum class Kind : uint8_t { none, tile, immediate, reg };
  Kind kind = Kind::none;
  double immediate = 0;
  int reg = -1;
  Access access;

  bool is_tile() const { return kind == Kind::tile; }
};

struct Bound {  // a number, or register * scale + number
  int reg = -1;
  int64_t value = 0, scale = 1;
};

// Reads that are looked at when they run: of what only loops wrote that may make no trip, or where a register says.
struct RuntimeReads {
  struct Read {
    Access access;
    UninitialisedRead error;
  };
  std::vector<Read> reads;
};

// Rows of a matmul's factors that hold what nothing wrote, or was computed from such. The product is right if the other
// factor is 0 there: kernels pad so.
struct UnwrittenRows {
  struct Row {
    uint8_t operand;                                     // a factor or its scale
    int64_t row;                                         // of the operand
    int64_t place;                                       // among its rows that are read
    int64_t begin, end;                                  // rows of the factors that it means
    std::vector<std::pair<int64_t, int64_t>> columns{};  // of the other factor, where it holds values there
  };
  std::vector<Row> rows;
  UninitialisedRead read{""};  // where they come from
};

struct Instruction {
  Opcode opcode = Opcode::memset;
  Engine engine = Engine::unknown;
  AluOp op0 = AluOp::bypass, op1 = AluOp::bypass, reduce_op = AluOp::add;
  Function function = Function::copy;
  ReduceCmd reduce_cmd = ReduceCmd::idle;
  OobMode oob_mode = OobMode::error;
  DgeMode dge_mode = DgeMode::unknown;
  PerfMode perf_mode = PerfMode::none;
  Accumulate accumulate = Accumulate::automatic;
  bool reverse0 = false, reverse1 = false, negate = false, transpose = false;
  bool discard = false;                 // nobody reads operand 0 (set by make_plan)
  std::array<int32_t, 2> pack{-1, -1};  // matmul factors: number among those that occur again (set by make_plan)
  uint8_t stage = 0;  // bit i: operand i overlaps the result in another pattern and is read first (set by seal)
  int64_t offset = 0, channel_multiplier = 0, count = 0, group = 0;
  double value = 0;
  Bound start, stop, step;
  int reg = -1;
  std::vector<int64_t> list;  // index pattern, shuffle mask, replica groups
  std::vector<Operand> operands;
  std::shared_ptr<const UnwrittenRows> unwritten;     // set by the tracker
  std::shared_ptr<const RuntimeReads> runtime_reads;  // set by the tracker
  uint32_t source = 0;                                // line of the kernel
  uint32_t match = 0;                                 // loops: the other end

  const InstructionSpec& spec() const { return neuron::spec(opcode); }
  const Operand& operand(int i) const { return operands[i]; }
};

// Attributes by name, for the front end and the disassembler.
struct Attribute {
  std::string_view name;
  std::function<void(Instruction&, double)> set;
  std::function<double(const Instruction&)> get;
};
std::span<const Attribute> attributes();

// Bytes live over time, from buffers' first to last use.
class LiveRanges {
 public:
  void allocate(uint32_t storage, const Storage& s);
  void use(uint32_t storage);
  void begin_loop();
  void end_loop();
  void tick() { ++now_; }
  struct Range {
    uint32_t storage;
    int64_t first = -1, last = -1;
  };
  const std::vector<Range>& ranges() const { return ranges_; }
  int64_t now() const { return now_; }

 private:
  std::vector<Range> ranges_;
  struct Loop {
    int64_t begin;
    std::vector<uint32_t> used;
  };
  std::vector<Loop> loops_;
  int64_t now_ = 0;
};

// What each byte of a buffer holds: a value, nothing (never written), or garbage (computed from what was never
// written).
class InitMap {
 public:
  enum Byte : uint8_t { unwritten, value, doubtful, garbage };  // doubtful: a value if UnwrittenRows do no harm
  enum class State : uint8_t { none, some, all };

  InitMap() = default;
  InitMap(int64_t rows, int64_t row_bytes, bool full) : rows_(rows), row_bytes_(row_bytes), full_(full) {}
  // How much of the access has been written, with values or garbage.
  State query(const Storage& s, const Access& a) const;
  // Linear byte address of the first byte of the access that holds no value; -1: none.
  int64_t first_without_value(const Storage& s, const Access& a) const;
  void mark(const Storage& s, const Access& a);
  // What each element of the access holds, in its order.
  std::vector<uint8_t> flags(const Storage& s, const Access& a) const;
  void assign(const Storage& s, const Access& a, const std::vector<uint8_t>& flags);
  void mark_all() { full_ = true, bytes_.clear(); }
  void mark_somewhere() { everywhere_ = everywhere_ && full_, mark_all(); }  // counts as all from now on
  void write_perhaps() { everywhere_ = everywhere_ && full_; }  // what is marked next may not be written at all
  bool everywhere() const { return everywhere_ && full_; }      // is every byte known to be written?
  bool full() const { return full_; }
  bool written(int64_t byte) const { return full_ || (!bytes_.empty() && bytes_[byte]); }
  int64_t first(Byte what) const;  // linear address, -1: none; what: doubtful or garbage

 private:
  int64_t rows_ = 0, row_bytes_ = 0, values_ = 0;
  bool full_ = false, everywhere_ = true;
  bool has_garbage_ = false;    // or something doubtful
  std::vector<uint8_t> bytes_;  // made at the first partial write
};

// Follows what a program's memory holds. Reading what nothing wrote makes garbage, as on hardware, where kernels may
// compute on rows that they never use; it is an error when all that is read is unwritten, when it is an index, or when
// garbage is in a result at the end. Also decides whether a matmul overwrites or adds.
class Tracker {
 public:
  void allocate(uint32_t storage, const Storage& s);
  void release(uint32_t storage);
  void mark_all(uint32_t storage) { maps_[storage].mark_all(); }
  // Throws UninitialisedRead. Resolves `accumulate` when it is the same for all elements.
  void visit(const std::vector<Storage>& storages, Instruction& instruction, bool in_loop);
  // Says whether a matmul's unwritten rows did no harm.
  void settle(const std::vector<Storage>& storages, const Instruction& in, bool harmless);
  // Throws UninitialisedRead if one of these buffers holds garbage. True: one holds something doubtful.
  bool check_results(const std::vector<Storage>& storages, const std::vector<uint32_t>& results) const;
  // The first read of something unwritten that a computation used; empty: none.
  std::string first_read(const std::vector<Storage>& storages) const;
  LiveRanges& live() { return live_; }
  const LiveRanges& live() const { return live_; }
  const InitMap& map(uint32_t storage) const { return maps_[storage]; }
  bool& check() { return check_; }

 private:
  struct Read {  // of something unwritten
    Opcode opcode;
    std::string_view operand;
    uint32_t storage, source, writer;
    Dtype dtype;
    int64_t byte;
  };
  using Origin = std::shared_ptr<const Read>;

  UninitialisedRead error(const std::vector<Storage>& storages, const Read& read) const;
  Origin read(const std::vector<Storage>& storages, const Instruction& in, const Access& a, std::string_view operand,
              bool must_be_value);
  // What each element that is read of an operand holds, but for unwritten rows: they count as values.
  std::vector<uint8_t> flags_read(const std::vector<Storage>& storages, const Instruction& in, size_t operand) const;
  Origin origin(const Instruction& in, const Access& a, std::string_view operand, int64_t at) const;
  std::shared_ptr<const UnwrittenRows> unwritten_rows(const std::vector<Storage>& storages, const Instruction& in,
                                                      Origin& origin) const;
  void write(const std::vector<Storage>& storages, const Instruction& in, size_t operand,
             const std::vector<size_t>& without_value, const Origin& origin, bool in_loop);
  void follow_loops(const Instruction& in);
  std::shared_ptr<const RuntimeReads> runtime_reads(const std::vector<Storage>& storages, const Instruction& in) const;

  struct Loop {
    bool may_skip;                  // it may make no trip
    std::vector<uint32_t> written;  // in it, and perhaps not before
  };
  std::vector<Loop> loops_;    // that are open
  std::vector<char> perhaps_;  // by storage: written by loops that may have made no trip
  std::vector<InitMap> maps_;
  std::vector<uint32_t> writer_;  // source line
  std::vector<Origin> origin_;    // of a buffer's garbage
  Origin first_;
  LiveRanges live_;
  bool check_ = true;
};

class Program {
 public:
  explicit Program(int generation = 4) : generation_(generation) {}

  uint32_t add_storage(Storage s);
  int add_register() { return registers_++; }
  // Validates against the table; returns the instruction (its engine chosen). Does not keep it: see append.
  void validate(Instruction& instruction) const;
  Instruction& append(Instruction instruction);
  // Notes what an instruction does to memory: append does so, and who runs it at once instead.
  void follow(Instruction& instruction, bool in_loop);

  // Throws UninitialisedRead if one of these buffers holds garbage.
  void check_results(const std::vector<uint32_t>& results) { proves_ = tracker_.check_results(storages_, results); }
  // After the last instruction: makes the plan that the executor follows (see plan.h). several: other cores run too.
  void seal(bool several = false);

  struct Peak {
    int64_t bytes = 0, time = 0;
  };

  const std::vector<Storage>& storages() const { return storages_; }
  std::vector<Instruction>& instructions() { return instructions_; }
  const std::vector<Instruction>& instructions() const { return instructions_; }
  const Plan& plan() const { return plan_; }
  // Whether results depend on it that matmuls' unwritten rows do no harm: then each is looked at when it runs.
  bool proves_unwritten_rows() const { return proves_; }
  int registers() const { return registers_; }
  int generation() const { return generation_; }
  Tracker& tracker() { return tracker_; }
  const Tracker& tracker() const { return tracker_; }
  SharedUses& shared_uses() { return shared_uses_; }
  const SharedUses& shared_uses() const { return shared_uses_; }
  int loop_depth() const { return static_cast<int>(open_loops_.size()); }

  static Peak peak(const std::vector<Storage>& storages, const LiveRanges& live, Memory memory);
  // Throws CapacityError.
  static void check_capacity(const std::vector<Storage>& storages, const LiveRanges& live, int64_t sbuf_bytes);

 private:
  int generation_;
  int registers_ = 0;
  bool proves_ = false;
  std::vector<Storage> storages_;
  std::vector<Instruction> instructions_;
  Plan plan_;
  std::vector<uint32_t> open_loops_;
  Tracker tracker_;
  SharedUses shared_uses_;
};

// One instruction in the field's notation: `vector tensor_scalar dst=t3[128,64] data=t3[128,64] operand0=2.0
// op0=multiply`.
std::string disassemble(const std::vector<Storage>& storages, const Instruction& instruction);

// Bytes [first, last) of a row, and partitions [begin, end), that an access can touch.
struct Box {
  int64_t partition_begin, partition_end, begin, end;
  bool overlaps(const Box& o) const {
    return partition_begin < o.partition_end && o.partition_begin < partition_end && begin < o.end && o.begin < end;
  }
};
Box bounding_box(const Storage& s, const Access& a);

}  // namespace neuron
