// The calling thread's record of failed system calls, behind kvp_last_errno().
#pragma once

#include <cerrno>

#include "kvpeer/kvpeer.h"

namespace kvpeer {

// Remembers an errno value for kvp_last_errno() of this thread and returns the code to hand to the caller: KVP_ENOMEM where memory
// or address space ran out, else KVP_ESYS.
int failed_with(int error) noexcept;

// The same with the current errno.
inline int failed_system_call() noexcept { return failed_with(errno); }

}  // namespace kvpeer
