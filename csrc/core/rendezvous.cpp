// Where cores meet: barriers and send/receive within a launch, collectives between ranks.
#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include "error.hpp"
#include "executor.hpp"

namespace neuron {
namespace {

// Rows of a view in element order, as contiguous bytes.
std::vector<char> read(const View& v) {
  const int64_t item = size_of(v.dtype);
  std::vector<char> out(v.rows * v.free * item);
  char* to = out.data();
  for (int64_t r = 0; r < v.rows; ++r)
    for (int64_t i = 0; i < v.free; ++i, to += item) {
      int64_t rest = i;
      const char* p = v.row(r);
      for (int d = v.ndim - 1; d >= 0; --d) p += rest % v.dims[d].size * v.dims[d].stride, rest /= v.dims[d].size;
      std::memcpy(to, p, item);
    }
  return out;
}

void write(const View& v, const char* from) {
  const int64_t item = size_of(v.dtype);
  for (int64_t r = 0; r < v.rows; ++r)
    for (int64_t i = 0; i < v.free; ++i, from += item) {
      int64_t rest = i;
      char* p = v.row(r);
      for (int d = v.ndim - 1; d >= 0; --d) p += rest % v.dims[d].size * v.dims[d].stride, rest /= v.dims[d].size;
      std::memcpy(p, from, item);
    }
}

}  // namespace

bool rendezvous(std::vector<Core*>& cores, const std::vector<const Instruction*>& waiting, std::vector<bool>& released) {
  const size_t n = cores.size();
  released.assign(n, false);
  bool progress = false;
  auto core_of = [&](int rank, int64_t program_id) -> int {
    for (size_t i = 0; i < n; ++i)
      if (cores[i]->rank() == rank && cores[i]->program_id() == program_id) return static_cast<int>(i);
    return -1;
  };
  for (size_t i = 0; i < n; ++i) {
    if (!waiting[i] || released[i]) continue;
    const Instruction& in = *waiting[i];
    if (in.opcode == Opcode::core_barrier) {
      std::vector<int> group;
      for (int64_t id : in.list) group.push_back(core_of(cores[i]->rank(), id));
      const bool all = std::all_of(group.begin(), group.end(), [&](int g) {
        return g >= 0 && waiting[g] && waiting[g]->opcode == Opcode::core_barrier;
      });
      if (!all) continue;
      for (int g : group) released[g] = true;
      progress = true;
    } else if (in.opcode == Opcode::sendrecv) {
      // offset: the core sent to; count: the core received from; group: the pipe.
      const int to = core_of(cores[i]->rank(), in.offset), from = core_of(cores[i]->rank(), in.count);
      auto meets = [&](int k) {
        return k >= 0 && waiting[k] && waiting[k]->opcode == Opcode::sendrecv && waiting[k]->group == in.group;
      };
      if (!meets(to) || !meets(from) || to != from) continue;
      const auto k = static_cast<size_t>(to);
      const auto mine = read(cores[i]->view(in.operand(0))), theirs = read(cores[k]->view(waiting[k]->operand(0)));
      if (mine.size() != theirs.size()) throw Error("sendrecv sides differ in size");
      write(cores[i]->view(in.operand(1)), theirs.data());
      if (k != i) write(cores[k]->view(waiting[k]->operand(1)), mine.data());
      released[i] = released[k] = true;
      progress = true;
    }
  }
  return progress;
}

void run(std::vector<Core*> cores) {
  const size_t n = cores.size();
  std::vector<const Instruction*> waiting(n, nullptr);
  std::vector<bool> finished(n, false), released;
  for (;;) {
    bool ran = false;
    for (size_t i = 0; i < n; ++i) {
      if (finished[i] || waiting[i]) continue;
      ran = true;
      const Core::State state = cores[i]->run();
      if (state == Core::State::finished) finished[i] = true;
      if (state == Core::State::waiting) waiting[i] = cores[i]->waiting_at();
    }
    if (std::all_of(finished.begin(), finished.end(), [](bool f) { return f; })) return;
    if (!rendezvous(cores, waiting, released) && !ran) {
      std::ostringstream out;
      out << "cores wait for each other for ever:";
      for (size_t i = 0; i < n; ++i)
        if (waiting[i])
          out << " core " << cores[i]->program_id() << " at " << waiting[i]->spec().name << " @" << waiting[i]->source;
        else
          out << " core " << cores[i]->program_id() << " has ended";
      throw Deadlock(out.str());
    }
    for (size_t i = 0; i < n; ++i)
      if (released[i]) {
        waiting[i] = nullptr;
        cores[i]->resume();
      }
  }
}

}  // namespace neuron
