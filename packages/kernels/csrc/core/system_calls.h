// The system calls of the file queue, as a table that tests replace to inject faults, and the kernel's io_uring interface.
//
// The interface is written out here (from the kernel's documentation of its stable ABI), because the headers of the old systems that
// wheels are built on don't have it. Where the running kernel lacks it or forbids it, setting up a ring fails and threads take over.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace drivetrain {

struct RingParams {
    std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
    struct {
        std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved1;
        std::uint64_t user_addr;
    } sq_off;
    struct {
        std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved1;
        std::uint64_t user_addr;
    } cq_off;
};
static_assert(sizeof(RingParams) == 120, "struct io_uring_params");

struct RingSubmission {
    std::uint8_t opcode, flags;
    std::uint16_t priority;
    std::int32_t fd;
    std::uint64_t offset, address;
    std::uint32_t length, operation_flags;
    std::uint64_t user_data;
    std::uint16_t buffer, personality;
    std::uint32_t reserved1;
    std::uint64_t reserved2[2];
};
static_assert(sizeof(RingSubmission) == 64, "struct io_uring_sqe");

struct RingCompletion {
    std::uint64_t user_data;
    std::int32_t result;
    std::uint32_t flags;
};
static_assert(sizeof(RingCompletion) == 16, "struct io_uring_cqe");

// Memory as struct iovec has it.
struct MemoryRange {
    char* data;
    std::size_t bytes;
};

// The real calls; results are negative error numbers instead of -1 with errno. Tests derive from it.
class SystemCalls {
public:
    virtual ~SystemCalls() = default;
    virtual ssize_t read(int fd, void* to, std::size_t bytes, std::int64_t offset);
    virtual ssize_t write(int fd, const void* from, std::size_t bytes, std::int64_t offset);
    virtual int ring_setup(unsigned entries, RingParams* params);
    virtual int ring_enter(int fd, unsigned submit, unsigned complete, unsigned flags);
    virtual int ring_register_memory(int fd, const MemoryRange* ranges, unsigned count);
    // What a ring's transfer of `bytes` is taken to have returned.
    virtual std::int32_t ring_result(bool writes, std::size_t bytes, std::int32_t result);

    static SystemCalls& real();
};

}  // namespace drivetrain
