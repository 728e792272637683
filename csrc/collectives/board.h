// The bulletin board of the ranks of one host: each rank writes into its own window, all read all windows.
//
// A collective is a number of rounds. In a round every rank writes into its window, publishes, waits until everyone has
// published the round, and reads the windows of the others. Windows come in pairs used in turn: whoever has published
// round r+1 has read round r, so a window is free again when everyone has published the round after it. No further
// synchronisation exists, and none is needed between operations. A rank that leaves for good keeps its memory until the
// others have read it (Node::retire).
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "segment.h"
#include "task.h"
#include "types.h"
#include "writer.h"

namespace neuron::collectives {

constexpr size_t kInlineBytes = 16 << 10;  // window that every group has for small operations

// What a rank says of itself when it enters a collective.
struct Notice {
  Signature signature;
  uint64_t operation = 0;     // number of the collective in its group
  uint64_t most = 0;          // most bytes for one peer (all_to_all)
  uint64_t window = 0;        // offset of a pair of bigger windows in the rank's segment
  uint64_t window_bytes = 0;  // of each of the two
};

struct alignas(64) BoardMemory {
  static constexpr uint64_t kForever = UINT64_MAX;
  alignas(64) std::atomic<uint64_t> round{0};
  std::atomic<uint64_t> left{0};   // last round that the rank has read to the end of an operation; kForever: it is gone
  std::atomic<uint64_t> token{0};  // another one than was announced: this is not the rank's board any more
  Notice notices[2];
  alignas(64) std::byte windows[2][kInlineBytes];
};

// A member of the board entered another collective than this rank.
struct Mismatch {
  int member;
  Signature theirs;
};

// A member sends this rank another number of bytes than it expects.
struct SizeMismatch {
  int member;
  uint64_t theirs, ours;
};

class Board {
 public:
  struct Member {
    std::shared_ptr<Segment> segment;
    BoardMemory* memory;
    uint64_t token;
  };
  // `members[me]` is this process's own.
  Board(std::vector<Member> members, int me);
  ~Board();

  int size() const { return static_cast<int>(members_.size()); }
  int me() const { return me_; }

  // Opens an operation: announces it, waits for everyone, compares (throws Mismatch). What was written into window()
  // before is published with it. `large`, the same on all ranks: bigger windows are wanted afterwards; window_bytes()
  // says what there is.
  Task<> open(Signature signature, uint64_t operation, uint64_t most, bool large);
  // This rank's window for the next publish().
  std::byte* window() { return windows_[me_] + (next_round() & 1) * stride_; }
  // Copies into it.
  void write(std::byte* to, const std::byte* from, size_t n) { writer_.write(to, from, n); }
  // A member's window of the last published round.
  const std::byte* window_of(int member) const { return windows_[member] + (round_ & 1) * stride_; }
  // A member's window as it was published with its notice.
  const std::byte* inline_window_of(int member) const { return members_[member].memory->windows[notice_round_ & 1]; }
  const Notice& notice_of(int member) const { return members_[member].memory->notices[notice_round_ & 1]; }
  size_t window_bytes() const { return bytes_; }
  // Makes window() visible; `co_await everyone()` then waits for the others to do the same.
  void publish();
  auto everyone() {
    return until([this] { return all_published(); });
  }
  // Ends an operation: this rank has read what it wants.
  void close();

  // Members that have not published the round this rank has (whom it waits for).
  std::vector<int> missing() const;
  // This rank starts nothing more. What it published must stay until it is forgotten().
  void leave() { self().left.store(BoardMemory::kForever, std::memory_order_release); }
  // Whether a member has left and will never publish the round that this rank has.
  bool deserted_by(int member) const;
  // Whether nobody will read any more what this rank published.
  bool forgotten() const;

 private:
  BoardMemory& self() { return *members_[me_].memory; }
  bool present(int member) const {
    return members_[member].memory->token.load(std::memory_order_acquire) == members_[member].token;
  }
  uint64_t next_round() const { return round_ + 1; }
  bool published(int member) const;
  bool all_published();
  void use_inline();

  std::vector<Member> members_;
  std::vector<std::byte*> windows_;  // first of each member's pair
  size_t stride_ = kInlineBytes, bytes_ = kInlineBytes;
  int me_;
  Writer writer_;
  int scanned_ = 0;  // members known to have published round_
  uint64_t round_ = 0, notice_round_ = 0;
  uint64_t large_ = 0, large_bytes_ = 0;  // this rank's pair of big windows; 0: none
};

}  // namespace neuron::collectives
