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
  self().token.store(0, std::memory_order_release);
  if (large_) members_[me_].segment->release(large_);
}

void Board::close() {
  self().left.store(round_, std::memory_order_release);
  use_inline();
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

bool Board::published(int member) const {
  return members_[member].memory->round.load(std::memory_order_acquire) >= round_ && present(member);
}

bool Board::all_published() {
  while (scanned_ < size() && published(scanned_)) scanned_++;
  return scanned_ == size();
}

std::vector<int> Board::missing() const {
  std::vector<int> out;
  for (int i = 0; i < size(); i++)
    if (!published(i)) out.push_back(i);
  return out;
}

bool Board::forgotten() const {
  for (int i = 0; i < size(); i++)
    if (i != me_ && present(i) && members_[i].memory->left.load(std::memory_order_acquire) < round_ &&
        members_[i].segment->alive())
      return false;
  return true;
}

bool Board::deserted_by(int member) const {
  // In this order: what it published before it left counts.
  const bool left =
      !present(member) || members_[member].memory->left.load(std::memory_order_acquire) == BoardMemory::kForever;
  return left && !published(member);
}

Task<> Board::open(Signature signature, uint64_t operation, uint64_t most, bool large) {
  Segment& segment = *members_[me_].segment;
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
