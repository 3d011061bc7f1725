#include "reference.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* Pages of one request: fewer than a system call takes vectors (IOV_MAX is 1024). */
#define PAGES_MAX 512

void kvb_copy(uint64_t n_pages, uint64_t n_pieces, void *const *to, const void *const *from, uint64_t piece_bytes) {
  for (uint64_t i = 0; i < n_pages * n_pieces; ++i) {
    memcpy(to[i], from[i], piece_bytes);
  }
}

void kvb_copy_and_sum(uint64_t n_pages, uint64_t n_pieces, void *const *to, const void *const *from, uint64_t piece_bytes,
                      kvb_checksum checksum, uint64_t *sums) {
  for (uint64_t page = 0; page < n_pages; ++page) {
    kvb_copy(1, n_pieces, to + page * n_pieces, from + page * n_pieces, piece_bytes);
    sums[page] = checksum(0, to[page * n_pieces], n_pieces * piece_bytes);
  }
}

struct request {
  uint64_t n;
  uint64_t page_bytes;
  const void *from[PAGES_MAX];
};

struct kvb_loopback {
  int reader;
  int writer;
  pthread_t thread;
  struct request asked;  /* the reader's */
  struct request served; /* the thread's */
};

typedef ssize_t (*transfer)(int fd, const struct iovec *vectors, int n_vectors);

/* All bytes of the vectors, which are used up. */
static int transfer_all(transfer move, int fd, struct iovec *vectors, int n_vectors) {
  while (n_vectors > 0) {
    ssize_t n = move(fd, vectors, n_vectors);
    if (n == 0) {
      return ECONNRESET;
    }
    if (n < 0) {
      if (errno == EINTR) {
        continue;
      }
      return errno;
    }
    while (n_vectors > 0 && (size_t)n >= vectors->iov_len) {
      n -= (ssize_t)vectors->iov_len;
      ++vectors;
      --n_vectors;
    }
    if (n_vectors > 0) {
      vectors->iov_base = (char *)vectors->iov_base + n;
      vectors->iov_len -= (size_t)n;
    }
  }
  return 0;
}

static int transfer_bytes(transfer move, int fd, void *bytes, size_t n_bytes) {
  struct iovec vector = {bytes, n_bytes};
  return transfer_all(move, fd, &vector, n_bytes > 0);
}

static int transfer_pages(transfer move, int fd, const void *const *pages, uint64_t n, uint64_t page_bytes) {
  struct iovec vectors[PAGES_MAX];
  for (uint64_t i = 0; i < n; ++i) {
    vectors[i].iov_base = (void *)pages[i];
    vectors[i].iov_len = page_bytes;
  }
  return transfer_all(move, fd, vectors, (int)n);
}

static size_t request_bytes(uint64_t n) { return offsetof(struct request, from) + n * sizeof(void *); }

static void *write_until_closed(void *argument) {
  kvb_loopback *loopback = argument;
  struct request *request = &loopback->served;
  while (transfer_bytes(readv, loopback->writer, request, request_bytes(0)) == 0 &&
         transfer_bytes(readv, loopback->writer, request->from, request_bytes(request->n) - request_bytes(0)) == 0 &&
         transfer_pages(writev, loopback->writer, request->from, request->n, request->page_bytes) == 0) {
  }
  return NULL;
}

int kvb_loopback_fetch(kvb_loopback *loopback, uint64_t n, void *const *to, const void *const *from, uint64_t page_bytes) {
  if (n == 0 || n > PAGES_MAX) {
    return EINVAL;
  }
  loopback->asked.n = n;
  loopback->asked.page_bytes = page_bytes;
  memcpy(loopback->asked.from, from, n * sizeof(void *));
  int error = transfer_bytes(writev, loopback->reader, &loopback->asked, request_bytes(n));
  return error != 0 ? error : transfer_pages(readv, loopback->reader, (const void *const *)to, n, page_bytes);
}

/* Two ends of one connection over the loopback interface. */
static int connect_ends(int listener, int *reader, int *writer) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof(address);
  if (bind(listener, (struct sockaddr *)&address, len) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, (struct sockaddr *)&address, &len) != 0 ||
      connect(*reader, (struct sockaddr *)&address, len) != 0) {
    return errno;
  }
  *writer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
  const int on = 1;
  if (*writer < 0 || setsockopt(*reader, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0 ||
      setsockopt(*writer, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) {
    return errno;
  }
  return 0;
}

static void close_ends(kvb_loopback *loopback) {
  if (loopback->reader >= 0) {
    close(loopback->reader);
  }
  if (loopback->writer >= 0) {
    close(loopback->writer);
  }
  free(loopback);
}

int kvb_loopback_open(kvb_loopback **out) {
  kvb_loopback *loopback = calloc(1, sizeof(*loopback));
  if (loopback == NULL) {
    return ENOMEM;
  }
  loopback->writer = -1;
  loopback->reader = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int error = loopback->reader < 0 || listener < 0 ? errno : connect_ends(listener, &loopback->reader, &loopback->writer);
  if (listener >= 0) {
    close(listener);
  }
  if (error == 0) {
    error = pthread_create(&loopback->thread, NULL, write_until_closed, loopback);
  }
  if (error != 0) {
    close_ends(loopback);
    return error;
  }
  *out = loopback;
  return 0;
}

void kvb_loopback_close(kvb_loopback *loopback) {
  shutdown(loopback->reader, SHUT_RDWR);
  pthread_join(loopback->thread, NULL);
  close_ends(loopback);
}
