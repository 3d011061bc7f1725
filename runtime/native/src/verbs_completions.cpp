#include "verbs_completions.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <thread>

#include "errors.hpp"
#include "socket_io.hpp"

namespace kvpeer::verbs {
namespace {

// The completions of a queue pair that was stopped come at once; whatever a device does, destroying it ends the wait.
constexpr uint64_t kDrainNs = 1'000'000'000;
constexpr int kCompletionsAtOnce = 16;

}  // namespace

Completions::~Completions() {
  if (bell_ >= 0) {
    ::close(bell_);
  }
}

int Completions::create(uint32_t requests_max) {
  bell_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  channel_ = {library_.create_comp_channel(context_), {&library_}};
  if (bell_ < 0 || channel_ == nullptr || ::fcntl(channel_->fd, F_SETFL, O_NONBLOCK) != 0) {
    return failed_system_call();
  }
  queue_ = {library_.create_cq(context_, static_cast<int>(requests_max), nullptr, channel_.get(), 0), {&library_}};
  return queue_ == nullptr ? failed_system_call() : KVP_OK;
}

int Completions::poll() {
  collect();
  if (error_ != 0) {
    return failed_with(error_);
  }
  switch (fault_) {
    case kSuccess:
      break;
    case kLocalLength:
    case kLocalQp:
    case kLocalProtection:
      return failed_with(EFAULT);  // we asked for what is not ours: a bug, and not the producer's
    default:
      return KVP_ECLOSED;  // the producer or the way to it is gone, or what it told of its memory holds no longer
  }
  if (is_all_done()) {
    return KVP_OK;
  }
  return is_shut_down_ ? KVP_ECLOSED : kPending;
}

void Completions::sleep(std::span<Completions *const> all, uint64_t until_ns) {
  std::array<pollfd, 2 * KVP_RAILS_MAX> waited;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i]->arm()) {
      return;
    }
    waited[2 * i] = {all[i]->channel_->fd, POLLIN, 0};
    waited[2 * i + 1] = {all[i]->bell_, POLLIN, 0};
  }
  const uint64_t now = now_ns();
  const uint64_t left_ns = until_ns > now ? until_ns - now : 0;
  const timespec left{static_cast<time_t>(left_ns / 1'000'000'000), static_cast<long>(left_ns % 1'000'000'000)};
  if (::ppoll(waited.data(), 2 * all.size(), &left, nullptr) <= 0) {
    return;
  }
  for (size_t i = 0; i < all.size(); ++i) {
    if (waited[2 * i].revents != 0) {
      all[i]->take_event();
    }
  }
}

void Completions::drain() {
  for (const uint64_t until_ns = now_ns() + kDrainNs; !is_all_done() && now_ns() < until_ns;) {
    const uint64_t done_id = done_id_;
    collect();
    if (done_id_ == done_id) {
      std::this_thread::yield();
    }
  }
}

void Completions::shutdown() {
  is_shut_down_ = true;
  ::eventfd_write(bell_, 1);
}

// Takes over what completed.
void Completions::collect() {
  std::array<Completion, kCompletionsAtOnce> completions;
  int n;
  while ((n = context_->ops.poll_cq(queue_.get(), kCompletionsAtOnce, completions.data())) > 0) {
    for (int i = 0; i < n; ++i) {
      done_id_ = completions[i].id;
      fault_ = fault_ == kSuccess ? completions[i].status : fault_;
    }
  }
  error_ = n < 0 && error_ == 0 ? EIO : error_;
}

// Asks the device for an event. False if there is news already: what completed before it was asked for makes none.
bool Completions::arm() {
  const uint64_t done_id = done_id_;
  const int error = context_->ops.req_notify_cq(queue_.get(), 0);
  error_ = error_ == 0 ? error : error_;
  return poll() == kPending && done_id_ == done_id;
}

void Completions::take_event() {
  CompletionQueue *queue = nullptr;
  void *context = nullptr;
  if (library_.get_cq_event(channel_.get(), &queue, &context) == 0) {
    library_.ack_cq_events(queue, 1);
  }
}

}  // namespace kvpeer::verbs
