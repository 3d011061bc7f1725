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

// How long a completion is polled for before the thread sleeps until the device wakes it: a short READ takes less, and a sleep costs
// about as much.
constexpr uint64_t kSpinNs = 20'000;
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

int Completions::await(uint64_t deadline_ns) {
  for (uint64_t spins_until_ns = now_ns() + kSpinNs;;) {
    if (int rc = poll(); rc != KVP_OK || is_all_done()) {
      return rc;
    }
    if (is_shut_down_) {
      return KVP_ECLOSED;
    }
    const uint64_t now = now_ns();
    if (now >= deadline_ns) {
      return KVP_ETIMEOUT;
    }
    if (now >= spins_until_ns) {
      if (int rc = sleep(deadline_ns); rc != KVP_OK) {
        return rc;
      }
    }
  }
}

void Completions::drain() {
  for (const uint64_t until_ns = now_ns() + kDrainNs; !is_all_done() && now_ns() < until_ns;) {
    const uint64_t done_id = done_id_;
    poll();
    if (done_id_ == done_id) {
      std::this_thread::yield();
    }
  }
}

void Completions::shutdown() {
  is_shut_down_ = true;
  ::eventfd_write(bell_, 1);
}

int Completions::poll() {
  std::array<Completion, kCompletionsAtOnce> completions;
  int n;
  while ((n = context_->ops.poll_cq(queue_.get(), kCompletionsAtOnce, completions.data())) > 0) {
    for (int i = 0; i < n; ++i) {
      done_id_ = completions[i].id;
      fault_ = fault_ == kSuccess ? completions[i].status : fault_;
    }
  }
  if (n < 0) {
    return failed_with(EIO);
  }
  switch (fault_) {
    case kSuccess:
      return KVP_OK;
    case kLocalLength:
    case kLocalQp:
    case kLocalProtection:
      return failed_with(EFAULT);  // we asked for what is not ours: a bug, and not the producer's
    default:
      return KVP_ECLOSED;  // the producer or the way to it is gone, or what it told of its memory holds no longer
  }
}

// Sleeps until something completes, shutdown() is called or the deadline passes; it may return for less.
int Completions::sleep(uint64_t deadline_ns) {
  if (int error = context_->ops.req_notify_cq(queue_.get(), 0); error != 0) {
    return failed_with(error);
  }
  // What completed before it was asked for makes no event.
  const uint64_t done_id = done_id_;
  if (int rc = poll(); rc != KVP_OK || done_id_ != done_id) {
    return rc;
  }
  std::array<pollfd, 2> waited{{{channel_->fd, POLLIN, 0}, {bell_, POLLIN, 0}}};
  const uint64_t now = now_ns();
  const uint64_t left_ns = deadline_ns > now ? deadline_ns - now : 0;
  const timespec left{static_cast<time_t>(left_ns / 1'000'000'000), static_cast<long>(left_ns % 1'000'000'000)};
  if (::ppoll(waited.data(), waited.size(), &left, nullptr) < 0 && errno != EINTR) {
    return failed_system_call();
  }
  CompletionQueue *queue = nullptr;
  void *context = nullptr;
  if (waited[0].revents != 0 && library_.get_cq_event(channel_.get(), &queue, &context) == 0) {
    library_.ack_cq_events(queue, 1);
  }
  return KVP_OK;
}

}  // namespace kvpeer::verbs
