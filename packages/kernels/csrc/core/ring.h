// One io_uring: a queue of reads and writes in the kernel. Belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "system_calls.h"

namespace drivetrain {

class Ring {
public:
    // Throws std::system_error when the kernel lacks or forbids io_uring; a no-op has gone through it before this returns.
    Ring(SystemCalls& calls, unsigned entries);
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring();

    // At most `entries` may be under way.
    void push(bool writes, int fd, void* data, std::size_t bytes, std::int64_t offset, std::uint64_t tag);
    // Hands what was pushed to the kernel and waits for one completion. Returns 0 or a negative error number.
    int submit_and_wait();
    bool pop(RingCompletion* completion);

private:
    void map();
    void unmap();
    void prove();
    RingSubmission& next();

    SystemCalls& calls_;
    RingParams params_{};
    int fd_ = -1;
    std::size_t ring_bytes_ = 0, entry_bytes_ = 0;
    char* ring_ = nullptr;
    RingSubmission* entries_ = nullptr;
    unsigned pushed_ = 0;
};

}  // namespace drivetrain
