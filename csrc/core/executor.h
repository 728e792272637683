// Runs programs on host memory: one Core per simulated NeuronCore, vector kernels, threads through a callback.
#pragma once
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "program.h"

namespace neuron {

using Range = std::function<void(int64_t begin, int64_t end)>;
// Calls body on disjoint parts of [0, n); may use several threads. Exceptions of the body must reach the caller.
using ParallelFor = std::function<void(int64_t n, const Range& body)>;

// What cores use unless told otherwise: set by whoever owns the process's threads (one thread until then).
void set_parallel_for(ParallelFor f);
const ParallelFor& parallel_for();

// An access resolved to memory: rows (partitions) of free elements.
struct View {
  char* base = nullptr;
  int64_t pitch = 0;  // bytes from row to row
  int64_t rows = 1, free = 1;
  int ndim = 0;  // of the free pattern, merged; strides in bytes
  std::array<Dim, kMaxDims> dims{};
  Dtype dtype = Dtype::float32;
  bool contiguous = false;
  bool discard = false;  // nobody reads what is written here
  int64_t partition = 0;

  char* row(int64_t p) const { return base + p * pitch; }
};

// Memory at a cache line: vectors that straddle two lines cost twice as much.
struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<char[], Free>;
Aligned new_aligned(int64_t bytes);  // uninitialised; throws std::bad_alloc

struct Buffer {
  char* base = nullptr;
  int64_t pitch = 0;
  Aligned owned;
};

// Random bits of a partition: Marsaglia's xorwow.
struct Xorwow {
  std::array<uint32_t, 6> s;
  explicit Xorwow(uint32_t seed = 0);
  uint32_t next();
};

// The accumulators of ScalarE and VectorE.
struct Registers {
  std::array<float, kPartitions> scalar{}, vector{};
};

class Core {
 public:
  // `program` outlives the core. program_id counts the cores of a launch, rank the participants of collectives.
  explicit Core(const Program& program, int program_id = 0, int rank = 0);
  ~Core();

  void bind(uint32_t storage, void* memory);  // HBM
  void allocate(uint32_t storage);            // step mode: SBUF and PSUM of its own
  void release(uint32_t storage) { buffers_[storage] = {}; }

  void execute(const Instruction& instruction);  // everything but control flow and rendezvous
  // Clears a matmul's unwritten rows. False: they do harm.
  bool leave_out(const Instruction& instruction);

  // Runs the sealed program up to its end, the next rendezvous, or a write that other cores see.
  enum class State { finished, waiting, ready };
  State run();
  const Instruction* waiting_at() const { return waiting_; }
  void resume();

  int64_t reg(int r) const { return registers_.at(r); }
  int64_t value(const Bound& b) const;
  void set_reg(int r, int64_t value);
  View view(const Operand& operand) const;
  Access placed(const Access& a) const;  // with its register's value
  bool is_inside(const Access& a) const;
  bool reaches(const Access& a) const;        // its register stays in the dimensions that it indexes
  std::string beyond(const Access& a) const;  // where it leads, for an error
  // Called now and then in long loops; it may throw. Lives as long as they run.
  void set_interrupt(const std::function<void()>* f) { interrupt_ = f; }
  const Program& program() const { return program_; }
  int program_id() const { return program_id_; }
  int rank() const { return rank_; }
  void seed(uint32_t s);
  char* memory(uint32_t storage) const { return buffers_[storage].base; }
  int64_t pitch(uint32_t storage) const { return buffers_[storage].pitch; }

 private:
  struct Call;
  struct Lane;
  friend struct Semantics;
  Call resolve(const Instruction& instruction, Lane* lane);
  void execute(const Instruction& instruction, Lane* lane);
  void run_segment(const CodeSegment& segment, Lane* lane);
  void run_rows(const CodeSegment& segment, Lane* lane);
  void mark_written(const Instruction& instruction);
  void look_at(const RuntimeReads& reads) const;
  void run_parts();
  void place(const Part& part, char* const arena[2]);
  void ensure(uint32_t storage);
  bool control(const Instruction& instruction, uint32_t& segment);
  bool condition(int reg) const { return registers_[reg] != 0; }
  void enter();

  const Program& program_;
  int program_id_, rank_;
  std::vector<Buffer> buffers_;
  std::vector<int64_t> registers_;
  Aligned arena_[2];  // SBUF, PSUM: row p of every tile lies in row p
  Registers registers_of_engines_;
  using Generator = std::vector<Xorwow>;  // of a partition: four states on VectorE, one on GpSimdE
  std::vector<Generator> random_[2];      // VectorE, GpSimdE
  std::vector<InitMap> runtime_maps_;     // of buffers with reads or matmuls that decide at run time
  std::vector<uint8_t> tracked_;
  uint32_t position_ = 0;  // segment
  bool entered_ = false;
  const std::function<void()>* interrupt_ = nullptr;
  uint32_t rounds_ = 0;  // of loops
  const Instruction* waiting_ = nullptr;
};

// Lets cores that wait for each other meet; false if none could go on, which is a deadlock.
bool rendezvous(std::vector<Core*>& cores, const std::vector<const Instruction*>& waiting, std::vector<bool>& released);
Deadlock deadlock(const std::vector<Core*>& cores, const std::vector<const Instruction*>& waiting);
// Runs all cores to their end.
void run(std::vector<Core*> cores);

}  // namespace neuron
