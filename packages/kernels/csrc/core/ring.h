// One io_uring: a queue of reads and writes in the kernel. Belongs to the thread that made it; only `wake` may be called from others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "system_calls.h"

namespace drivetrain {

class Ring {
public:
    // Throws std::system_error when the kernel lacks or forbids io_uring; a no-op has gone through it before this returns.
    // At most `entries` transfers may be under way.
    Ring(SystemCalls& calls, unsigned entries);
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring();

    // Lets the kernel keep hold of this memory, so that transfers from and to it needn't look up its pages each time. Once, before any
    // transfer. Returns 0 or an error number, and is then no worse than before.
    int hold(const std::vector<MemoryRange>& memory);

    void push(bool writes, int fd, char* data, std::size_t bytes, std::int64_t offset, std::uint64_t tag);
    // Hands what was pushed to the kernel and waits until `completions` can be popped, or for a `wake`. Returns 0 or a negative error
    // number.
    int submit_and_wait(unsigned completions);
    bool pop(RingCompletion* completion);
    // Ends a wait for one completion, the one that is under way or else the next.
    void wake();

private:
    void set_up(unsigned entries);
    void map();
    void release();
    void prove();
    void watch();
    RingSubmission& next();
    int held_at(const char* data, std::size_t bytes) const;

    SystemCalls& calls_;
    RingParams params_{};
    int fd_ = -1, wake_fd_ = -1;
    std::size_t ring_bytes_ = 0, entry_bytes_ = 0;
    char* ring_ = nullptr;
    RingSubmission* entries_ = nullptr;
    unsigned pushed_ = 0;
    std::vector<MemoryRange> held_;  // in the order of their addresses
};

}  // namespace drivetrain
