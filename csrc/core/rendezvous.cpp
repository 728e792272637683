// Where cores meet: barriers and send/receive within a launch, collectives between ranks.
#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include "error.h"
#include "executor.h"
#include "simd/kernels.h"

namespace neuron {
namespace {

[[noreturn]] void fail(const Instruction& in, std::string_view operand, const std::string& limit) {
  throw ValidationError(in.spec().name, operand, limit, in.source);
}

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

std::vector<float> widen(const std::vector<char>& bytes, Dtype t) {
  std::vector<float> out(bytes.size() / size_of(t));
  kernels().load[static_cast<int>(t)](bytes.data(), size_of(t), static_cast<int64_t>(out.size()), out.data());
  return out;
}

std::vector<char> narrow(const std::vector<float>& values, Dtype t) {
  std::vector<char> out(values.size() * size_of(t));
  kernels().store[static_cast<int>(t)](values.data(), static_cast<int64_t>(values.size()), out.data(), size_of(t));
  return out;
}

// What those that meet must agree on.
struct Agreed {
  std::string_view operand;
  std::string (*text)(const Instruction&);
};

std::string list_text(const Instruction& in) {
  std::string out;
  for (const int64_t r : in.list) out += (out.empty() ? "" : ", ") + std::to_string(r);
  return "[" + out + "]";
}

std::string source_text(const Instruction& in) {
  const Access& src = in.operand(in.spec().operand_index("src")).access;
  const bool variable = in.opcode == Opcode::all_gather_v || in.opcode == Opcode::all_to_all_v;
  return std::string(info(src.dtype).name) + (variable ? "" : " of " + std::to_string(src.elements()) + " elements");
}

constexpr Agreed kAgreed[] = {
    {"", [](const Instruction& in) { return std::string(in.spec().name); }},
    {"replica_group", list_text},
    {"op", [](const Instruction& in) { return std::string(info(in.op0).name); }},
    {"collective_dim",
     [](const Instruction& in) { return in.opcode == Opcode::sendrecv ? "" : std::to_string(in.offset); }},
    {"src", source_text},
};

// The operand that says whom an instruction waits for.
std::string_view partners(Opcode opcode) {
  return opcode == Opcode::core_barrier ? "cores" : opcode == Opcode::sendrecv ? "recv_from_rank" : "replica_group";
}

bool is_collective(const Instruction& in) {
  return in.opcode >= Opcode::all_reduce && in.opcode <= Opcode::collective_permute;
}

// Throws if two that wait for each other do different things.
void check_agreement(const Instruction& mine, const Core& other, const Instruction& theirs) {
  for (const Agreed& a : kAgreed)
    if (const std::string x = a.text(mine), y = a.text(theirs); x != y) {
      std::ostringstream out;
      out << "is " << x << " here, and " << y << " on rank " << other.rank() << ", core " << other.program_id() << ", @"
          << theirs.source;
      fail(mine, a.operand, out.str());
    }
}

// What every member of a group contributes to a collective, in the order of the group.
struct Member {
  Core* core;
  const Instruction* in;
  View dst;
  std::vector<char> src;
  int64_t rows;  // of src
};

// Rows of `bytes` [rows][row] cut into `parts` along dimension 0 or 1: part j.
std::vector<char> part(const std::vector<char>& bytes, int64_t rows, int64_t dim, int64_t parts, int64_t j) {
  const int64_t n = static_cast<int64_t>(bytes.size()), row = n / std::max<int64_t>(1, rows);
  if (dim == 0) return {bytes.begin() + j * (n / parts), bytes.begin() + (j + 1) * (n / parts)};
  std::vector<char> out;
  const int64_t width = row / parts;
  for (int64_t r = 0; r < rows; ++r)
    out.insert(out.end(), bytes.begin() + r * row + j * width, bytes.begin() + r * row + (j + 1) * width);
  return out;
}

std::vector<char> join(const std::vector<std::vector<char>>& parts, int64_t rows, int64_t dim) {
  std::vector<char> out;
  if (dim == 0) {
    for (const auto& p : parts) out.insert(out.end(), p.begin(), p.end());
    return out;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (const auto& p : parts) {
      const int64_t row = static_cast<int64_t>(p.size()) / rows;
      out.insert(out.end(), p.begin() + r * row, p.begin() + (r + 1) * row);
    }
  return out;
}

std::vector<float> reduce(const std::vector<Member>& members) {
  const Instruction& in = *members[0].in;
  const Dtype t = in.operand(1).access.dtype;
  std::vector<float> sum = widen(members[0].src, t);
  for (size_t k = 1; k < members.size(); ++k) {
    const std::vector<float> x = widen(members[k].src, t);
    kernels().binary[static_cast<int>(in.op0)](sum.data(), 1, x.data(), 1, sum.data(),
                                               static_cast<int64_t>(sum.size()));
  }
  return sum;
}

void store(const Member& m, const std::vector<char>& bytes) {
  if (static_cast<int64_t>(bytes.size()) != m.dst.rows * m.dst.free * size_of(m.dst.dtype))
    fail(*m.in, "dst", "has another size than what it gets");
  write(m.dst, bytes.data());
}

// Rows of the metadata of the variable-size collectives.
enum Metadata { kSendCounts, kSendDispls, kRecvCounts, kRecvDispls };

void exchange_variable(std::vector<Member>& members) {
  const auto n = static_cast<int64_t>(members.size());
  std::vector<std::vector<char>> metadata;
  for (Member& m : members) {
    metadata.push_back(read(m.core->view(m.in->operand(2))));
    if (metadata.back().size() != 4 * n * sizeof(uint32_t))
      fail(*m.in, "metadata", "must have 4 rows, a number for each rank");
  }
  auto word = [&](int64_t rank, Metadata row, int64_t column) -> uint32_t& {
    return reinterpret_cast<uint32_t*>(metadata[rank].data())[row * n + column];
  };
  const bool gather = members[0].in->opcode == Opcode::all_gather_v;
  for (int64_t to = 0; to < n; ++to) {
    Member& m = members[to];
    const int64_t item = size_of(m.dst.dtype), slot = m.dst.rows * m.dst.free / n;
    std::vector<char> out = read(m.dst);  // what nobody sends to keeps its value
    for (int64_t from = 0; from < n; ++from) {
      const int64_t column = gather ? from : to;  // a gather sends one piece to everybody
      const int64_t count = word(from, kSendCounts, column), at = word(from, kSendDispls, column);
      const int64_t place = m.in->reverse1 ? word(to, kRecvDispls, from) : from * slot;
      if ((place + count) * item > static_cast<int64_t>(out.size()) ||
          (at + count) * item > static_cast<int64_t>(members[from].src.size()))
        throw OutOfBounds(m.in->spec().name, "metadata", "counts and displacements leave the tensor", m.in->source);
      std::memcpy(out.data() + place * item, members[from].src.data() + at * item, count * item);
      word(to, kRecvCounts, from) = static_cast<uint32_t>(count);
    }
    write(m.dst, out.data());
  }
  for (int64_t k = 0; k < n; ++k) write(members[k].core->view(members[k].in->operand(2)), metadata[k].data());
}

void exchange(std::vector<Member>& members) {
  const Instruction& in = *members[0].in;
  const auto n = static_cast<int64_t>(members.size());
  const int64_t dim = in.offset;
  switch (in.opcode) {
    case Opcode::all_reduce: {
      const std::vector<float> sum = reduce(members);
      for (const Member& m : members) store(m, narrow(sum, m.dst.dtype));
      return;
    }
    case Opcode::reduce_scatter: {
      const std::vector<float> sum = reduce(members);
      for (int64_t k = 0; k < n; ++k)
        store(members[k], part(narrow(sum, members[k].dst.dtype), members[k].rows, dim, n, k));
      return;
    }
    case Opcode::all_gather: {
      std::vector<std::vector<char>> all;
      for (const Member& m : members) all.push_back(m.src);
      for (const Member& m : members) store(m, join(all, m.rows, dim));
      return;
    }
    case Opcode::all_to_all:
      for (int64_t k = 0; k < n; ++k) {
        std::vector<std::vector<char>> mine;
        for (const Member& m : members) mine.push_back(part(m.src, m.rows, dim, n, k));
        store(members[k], join(mine, members[k].rows, dim));
      }
      return;
    case Opcode::all_gather_v:
    case Opcode::all_to_all_v:
      return exchange_variable(members);
    case Opcode::collective_permute:
      for (size_t k = 0; k + 1 < in.list.size(); k += 2)
        for (const Member& from : members)
          for (const Member& to : members)
            if (from.core->rank() == in.list[k] && to.core->rank() == in.list[k + 1]) store(to, from.src);
      return;
    default:
      return;
  }
}

}  // namespace

bool rendezvous(std::vector<Core*>& cores, const std::vector<const Instruction*>& waiting,
                std::vector<bool>& released) {
  const size_t n = cores.size();
  released.assign(n, false);
  bool progress = false;
  auto core_of = [&](int64_t rank, int64_t program_id) -> int {
    for (size_t i = 0; i < n; ++i)
      if (cores[i]->rank() == rank && cores[i]->program_id() == program_id) return static_cast<int>(i);
    return -1;
  };
  auto names = [](const Instruction& in, int64_t number) { return std::ranges::count(in.list, number) > 0; };
  for (size_t i = 0; i < n; ++i) {
    if (!waiting[i] || released[i]) continue;
    const Instruction& in = *waiting[i];
    const int rank = cores[i]->rank(), id = cores[i]->program_id();
    if (in.opcode == Opcode::core_barrier) {
      if (!names(in, id)) fail(in, "cores", "does not name the core itself");
      std::vector<int> group;
      for (int64_t other : in.list) group.push_back(core_of(rank, other));
      const bool all = std::ranges::all_of(group, [&](int g) {
        return g >= 0 && waiting[g] && waiting[g]->opcode == Opcode::core_barrier && names(*waiting[g], id);
      });
      if (!all) continue;
      for (int g : group) released[g] = true;
      progress = true;
    } else if (in.opcode == Opcode::sendrecv) {
      // offset: the core sent to; count: the core received from; group: the pipe.
      const int to = core_of(rank, in.offset), from = core_of(rank, in.count);
      if (to < 0 || to != from) continue;
      const auto k = static_cast<size_t>(to);
      const Instruction* peer = waiting[k];
      if (!peer || peer->opcode != in.opcode || peer->group != in.group || peer->offset != id || peer->count != id)
        continue;
      check_agreement(in, *cores[k], *peer);
      const auto mine = read(cores[i]->view(in.operand(0))), theirs = read(cores[k]->view(peer->operand(0)));
      write(cores[i]->view(in.operand(1)), theirs.data());
      if (k != i) write(cores[k]->view(peer->operand(1)), mine.data());
      released[i] = released[k] = true;
      progress = true;
    } else {  // a collective of the ranks in the list, core by core
      if (!names(in, rank)) fail(in, "replica_group", "does not name the rank itself");
      std::vector<int64_t> ranks = in.list;
      if (in.opcode == Opcode::collective_permute) {
        std::ranges::sort(ranks);
        ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
      }
      std::vector<int> group;
      for (const int64_t other : ranks) {
        const int g = core_of(other, id);
        const Instruction* theirs = g < 0 ? nullptr : waiting[g];
        // Two that wait for each other stay: what they do must fit. One that waits for others may come later.
        if (!theirs || !is_collective(*theirs) || !names(*theirs, rank)) break;
        check_agreement(in, *cores[g], *theirs);
        group.push_back(g);
      }
      if (group.size() < ranks.size()) continue;
      std::vector<Member> members;
      for (int g : group) {
        const View src = cores[g]->view(waiting[g]->operand(1));
        members.push_back({cores[g], waiting[g], cores[g]->view(waiting[g]->operand(0)), read(src), src.rows});
        released[g] = true;
      }
      exchange(members);
      progress = true;
    }
  }
  return progress;
}

Deadlock deadlock(const std::vector<Core*>& cores, const std::vector<const Instruction*>& waiting) {
  std::ostringstream out;
  out << "cores wait for each other for ever";
  const Instruction* first = nullptr;
  for (size_t i = 0; i < cores.size(); ++i) {
    out << (i ? "; core " : ": core ") << cores[i]->program_id();
    if (waiting[i])
      out << " waits at " << waiting[i]->spec().name << " @" << waiting[i]->source;
    else
      out << " has ended";
    if (!first) first = waiting[i];
  }
  return {first->spec().name, partners(first->opcode), out.str(), first->source};
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
    if (!rendezvous(cores, waiting, released) && !ran) throw deadlock(cores, waiting);
    for (size_t i = 0; i < n; ++i)
      if (released[i]) {
        waiting[i] = nullptr;
        cores[i]->resume();
      }
  }
}

}  // namespace neuron
