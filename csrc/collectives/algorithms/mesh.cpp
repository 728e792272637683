#include "mesh.h"

#include <algorithm>
#include <cstring>

#include "../reduce.h"

namespace neuron::collectives::mesh {

namespace {

constexpr size_t kAlign = 64;

size_t div_up(size_t a, size_t b) { return (a + b - 1) / b; }
size_t align_down(size_t n) { return n / kAlign * kAlign; }
size_t align_up(size_t n) { return div_up(n, kAlign) * kAlign; }

void put(std::byte* to, const std::byte* from, size_t n) {
  if (n && to != from) std::memcpy(to, from, n);
}

// The part of a piece that starts at `offset` and is at most `bytes` long.
size_t part(const Piece& piece, size_t offset, size_t bytes) {
  return piece.bytes > offset ? std::min(piece.bytes - offset, bytes) : 0;
}

// Small reductions: one round; everyone reduces everything, in the same order.
Task<> reduce_once(Board& board, uint64_t operation, const Call& call) {
  const Piece& in = call.in[0];
  board.write(board.window(), in.data, in.bytes);
  co_await board.open(call.signature, operation, 0, false);
  if (!call.out.empty()) {
    std::vector<const void*> sources;
    for (int i = 0; i < board.size(); i++) sources.push_back(board.window_of(i));
    const DataType dtype = call.signature.dtype;
    reduce(call.out[0].data, sources.data(), board.size(), in.bytes / size_of(dtype), dtype, call.signature.reduction,
           board.size());
  }
  board.close();
}

// all_reduce and reduce: rank j reduces slice j of each chunk; in the next round, with the next chunk's slices, it
// publishes the result.
Task<> reduce_chunks(Board& board, uint64_t operation, const Call& call) {
  const int n = board.size(), me = board.me();
  const Piece& in = call.in[0];
  const DataType dtype = call.signature.dtype;
  const size_t element = size_of(dtype);
  std::byte* out = call.out.empty() ? nullptr : call.out[0].data;
  co_await board.open(call.signature, operation, 0, true);

  // A window holds a slice for each other rank and the reduced one.
  const size_t most = align_down(board.window_bytes() / n);
  auto place = [&](int owner, int reader) { return (reader < owner ? reader : reader - 1) * most; };
  const size_t reduced_place = (n - 1) * most;
  std::vector<const void*> sources(n);
  std::vector<std::byte> own;  // the reduced slice of a rank that has no output
  if (!out) own.resize(most);
  auto slice_of = [&](size_t begin) { return std::min(most, align_up(div_up(in.bytes - begin, n))); };

  size_t begin = 0, slice = slice_of(0);         // of the chunk whose slices are published now
  size_t done_begin = in.bytes, done_slice = 0;  // of the chunk whose reduced slices are
  while (begin < in.bytes || done_begin < in.bytes) {
    std::byte* window = board.window();
    for (int j = 0; j < n; j++)
      if (j != me) board.write(window + place(me, j), in.data + begin + j * slice, part(in, begin + j * slice, slice));
    board.publish();
    co_await board.everyone();
    if (out)
      for (int j = 0; j < n; j++)
        if (j != me)
          put(out + done_begin + j * done_slice, board.window_of(j) + reduced_place,
              part(in, done_begin + j * done_slice, done_slice));
    const size_t mine = begin + me * slice, bytes = part(in, mine, slice);
    if (bytes) {
      for (int j = 0; j < n; j++) sources[j] = board.window_of(j) + (j == me ? 0 : place(j, me));
      sources[me] = in.data + mine;
      std::byte* result = out ? out + mine : own.data();
      reduce(result, sources.data(), n, bytes / element, dtype, call.signature.reduction, n);
      board.write(board.window() + reduced_place, result, bytes);
    }
    done_begin = begin;
    done_slice = slice;
    begin = std::min(in.bytes, begin + n * slice);
    slice = begin < in.bytes ? slice_of(begin) : 0;
  }
  board.close();
}

Task<> reduce_scatter(Board& board, uint64_t operation, const Call& call) {
  const int n = board.size(), me = board.me();
  const DataType dtype = call.signature.dtype;
  const bool small = call.most * n <= kInlineBytes;
  const size_t small_slice = align_down(kInlineBytes / n);
  std::vector<const void*> sources(n);
  size_t slice = small_slice;
  auto write = [&](size_t offset) {
    for (int j = 0; j < n; j++)
      if (j != me) board.write(board.window() + j * slice, call.in[j].data + offset, part(call.in[j], offset, slice));
  };
  auto read = [&](size_t offset) {
    const size_t bytes = part(call.out[0], offset, slice);
    if (!bytes) return;
    for (int j = 0; j < n; j++) sources[j] = board.window_of(j) + me * slice;
    sources[me] = call.in[me].data + offset;
    reduce(call.out[0].data + offset, sources.data(), n, bytes / size_of(dtype), dtype, call.signature.reduction, n);
  };
  const bool with_notice = small && call.most <= small_slice;
  if (with_notice) write(0);
  co_await board.open(call.signature, operation, 0, !with_notice);
  if (with_notice)
    read(0);
  else
    slice = align_down(board.window_bytes() / n);
  for (size_t offset = 0; !with_notice && offset < call.most; offset += slice) {
    write(offset);
    board.publish();
    co_await board.everyone();
    read(offset);
  }
  board.close();
}

// all_gather, gather, broadcast: what a rank sends is the same for all.
Task<> share(Board& board, uint64_t operation, const Call& call) {
  auto write = [&](size_t offset, size_t bytes) {
    if (!call.in.empty()) board.write(board.window(), call.in[0].data + offset, part(call.in[0], offset, bytes));
  };
  auto read = [&](size_t offset, size_t bytes) {
    for (size_t j = 0; j < call.out.size(); j++) {
      const Piece& out = call.out[j];
      if (!out.data) continue;
      const std::byte* from = static_cast<int>(j) == board.me() ? call.in[0].data + offset : board.window_of(j);
      put(out.data + offset, from, part(out, offset, bytes));
    }
  };
  const bool small = call.most <= kInlineBytes;
  if (small) write(0, kInlineBytes);
  co_await board.open(call.signature, operation, 0, !small);
  if (small) read(0, kInlineBytes);
  const size_t chunk = board.window_bytes();
  for (size_t offset = 0; !small && offset < call.most; offset += chunk) {
    write(offset, chunk);
    board.publish();
    co_await board.everyone();
    read(offset, chunk);
  }
  board.close();
}

// all_to_all, scatter: a window has a slice for each reader.
Task<> exchange(Board& board, uint64_t operation, const Call& call) {
  const int n = board.size(), me = board.me();
  size_t slice = align_down(kInlineBytes / n);
  auto write = [&](size_t offset) {
    for (size_t j = 0; j < call.in.size(); j++)
      if (static_cast<int>(j) != me)
        board.write(board.window() + j * slice, call.in[j].data + offset, part(call.in[j], offset, slice));
  };
  auto read = [&](size_t offset) {
    for (size_t j = 0; j < call.out.size(); j++) {
      const Piece& out = call.out[j];
      if (!out.data) continue;
      const std::byte* from = static_cast<int>(j) == me ? call.in[me].data + offset : board.window_of(j) + me * slice;
      put(out.data + offset, from, part(out, offset, slice));
    }
  };
  const bool small = !call.uneven && call.most <= slice;
  auto* lengths = reinterpret_cast<uint64_t*>(board.window());
  if (small) write(0);
  if (call.uneven)
    for (int j = 0; j < n; j++) lengths[j] = call.in[j].bytes;
  co_await board.open(call.signature, operation, call.most, !small);
  size_t most = call.most;
  if (call.uneven) {
    for (int j = 0; j < n; j++) {
      most = std::max<size_t>(most, board.notice_of(j).most);
      const uint64_t* theirs = reinterpret_cast<const uint64_t*>(board.inline_window_of(j));
      if (theirs[me] != call.out[j].bytes) throw SizeMismatch{j, theirs[me], call.out[j].bytes};
    }
  }
  if (small)
    read(0);
  else
    slice = align_down(board.window_bytes() / n);
  for (size_t offset = 0; !small && offset < most; offset += slice) {
    write(offset);
    board.publish();
    co_await board.everyone();
    read(offset);
  }
  board.close();
}

Task<> meet(Board& board, uint64_t operation, const Call& call) {
  co_await board.open(call.signature, operation, 0, false);
  board.close();
}

}  // namespace

Task<> run(Board& board, uint64_t operation, const Call& call) {
  switch (call.signature.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      return call.in[0].bytes <= kInlineBytes ? reduce_once(board, operation, call)
                                              : reduce_chunks(board, operation, call);
    case Kind::reduce_scatter:
      return reduce_scatter(board, operation, call);
    case Kind::all_gather:
    case Kind::gather:
    case Kind::broadcast:
      return share(board, operation, call);
    case Kind::all_to_all:
    case Kind::scatter:
      return exchange(board, operation, call);
    default:
      return meet(board, operation, call);
  }
}

}  // namespace neuron::collectives::mesh
