#include "board.h"

#include <algorithm>
#include <optional>

namespace neuron::collectives {

namespace {
// Two windows fit the second-level cache together with what is copied.
constexpr size_t kLargeBytes = 256 << 10;
}  // namespace

Board::Board(std::vector<Member> members, int me) : members_(std::move(members)), windows_(members_.size()), me_(me) {
  use_inline();
}

Board::~Board() {
  if (large_) members_[me_].segment->release(large_);
}

void Board::close() {
  self().left.store(round_, std::memory_order_release);
  use_inline();
  in_operation_ = false;
}

void Board::use_inline() {
  for (size_t i = 0; i < members_.size(); i++) windows_[i] = members_[i].memory->windows[0];
  stride_ = bytes_ = kInlineBytes;
}

void Board::publish() {
  round_++;
  scanned_ = 0;
  self().round.store(round_, std::memory_order_release);
  // Everyone waits for everyone: only the last to come has anybody to wake.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (all_published())
    for (int i = 0; i < size(); i++)
      if (i != me_) members_[i].segment->doorbell().ring();
}

bool Board::all_published() {
  while (scanned_ < size() && members_[scanned_].memory->round.load(std::memory_order_acquire) >= round_) scanned_++;
  return scanned_ == size();
}

std::vector<int> Board::missing() const {
  std::vector<int> out;
  for (int i = 0; i < size(); i++)
    if (members_[i].memory->round.load(std::memory_order_acquire) < round_) out.push_back(i);
  return out;
}

bool Board::release_idle_window() {
  if (!large_ || in_operation_) return false;
  for (auto& m : members_)
    if (m.memory->left.load(std::memory_order_acquire) < round_) return false;
  members_[me_].segment->release(std::exchange(large_, 0));
  large_bytes_ = 0;
  return true;
}

Task<> Board::open(Signature signature, uint64_t operation, uint64_t most, bool large) {
  Segment& segment = *members_[me_].segment;
  in_operation_ = true;
  std::optional<uint64_t> old;
  if (large && large_bytes_ < kLargeBytes) {
    if (large_) old = std::exchange(large_, 0);
    for (size_t bytes = kLargeBytes; !large_ && bytes > kInlineBytes; bytes /= 2)
      if (auto offset = segment.allocate(2 * bytes)) {
        large_ = *offset;
        large_bytes_ = bytes;
      }
    if (!large_) large_bytes_ = 0;
  }
  notice_round_ = next_round();
  self().notices[notice_round_ & 1] = {signature, operation, most, large_, large_bytes_};
  publish();
  co_await everyone();
  if (old) segment.release(*old);  // everyone has ended the operation before

  size_t agreed = kLargeBytes;
  for (int i = 0; i < size(); i++) {
    const Notice& notice = notice_of(i);
    if (notice.signature != signature) throw Mismatch{i, notice.signature};
    agreed = std::min<size_t>(agreed, notice.window_bytes);
  }
  if (large && agreed > kInlineBytes) {
    for (int i = 0; i < size(); i++) windows_[i] = members_[i].segment->at<std::byte>(notice_of(i).window, 2 * agreed);
    stride_ = bytes_ = agreed;
  }
}

}  // namespace neuron::collectives
