#include "ring.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

namespace drivetrain {
namespace {

constexpr std::uint32_t kSingleMap = 1u << 0;  // both rings in one mapping: Linux 5.4
constexpr off_t kEntriesOffset = 0x10000000;
constexpr std::uint8_t kNop = 0, kRead = 22, kWrite = 23;
constexpr unsigned kGetEvents = 1;

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

}  // namespace

Ring::Ring(SystemCalls& calls, unsigned entries) : calls_(calls) {
    fd_ = calls_.ring_setup(entries, &params_);
    if (fd_ < 0) fail(-fd_, "io_uring_setup");
    try {
        map();
        prove();
    } catch (...) {
        unmap();
        throw;
    }
}

Ring::~Ring() { unmap(); }

void Ring::map() {
    if ((params_.features & kSingleMap) == 0) fail(ENOSYS, "io_uring of this kernel is too old");
    ring_bytes_ = std::max<std::size_t>(params_.sq_off.array + params_.sq_entries * sizeof(std::uint32_t),
                                        params_.cq_off.cqes + params_.cq_entries * sizeof(RingCompletion));
    void* ring = mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (ring == MAP_FAILED) fail(errno, "mmap of the rings");
    ring_ = static_cast<char*>(ring);
    entry_bytes_ = params_.sq_entries * sizeof(RingSubmission);
    void* entries = mmap(nullptr, entry_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, kEntriesOffset);
    if (entries == MAP_FAILED) fail(errno, "mmap of the submissions");
    entries_ = static_cast<RingSubmission*>(entries);
}

void Ring::unmap() {
    if (entries_ != nullptr) munmap(entries_, entry_bytes_);
    if (ring_ != nullptr) munmap(ring_, ring_bytes_);
    if (fd_ >= 0) close(fd_);
}

// A sandbox may allow the setup and forbid the use.
void Ring::prove() {
    next().opcode = kNop;
    const int error = submit_and_wait();
    if (error < 0) fail(-error, "io_uring_enter");
    RingCompletion completion;
    if (!pop(&completion) || completion.result < 0) fail(EIO, "a no-op through io_uring");
}

RingSubmission& Ring::next() {
    auto* tail = reinterpret_cast<std::uint32_t*>(ring_ + params_.sq_off.tail);
    const auto mask = *reinterpret_cast<std::uint32_t*>(ring_ + params_.sq_off.ring_mask);
    auto* order = reinterpret_cast<std::uint32_t*>(ring_ + params_.sq_off.array);
    const std::uint32_t place = (*tail + pushed_++) & mask;
    order[place] = place;
    std::memset(&entries_[place], 0, sizeof entries_[place]);
    return entries_[place];
}

void Ring::push(bool writes, int fd, void* data, std::size_t bytes, std::int64_t offset, std::uint64_t tag) {
    RingSubmission& entry = next();
    entry.opcode = writes ? kWrite : kRead;
    entry.fd = fd;
    entry.address = reinterpret_cast<std::uintptr_t>(data);
    entry.length = static_cast<std::uint32_t>(bytes);
    entry.offset = static_cast<std::uint64_t>(offset);
    entry.user_data = tag;
}

int Ring::submit_and_wait() {
    auto* tail = reinterpret_cast<std::uint32_t*>(ring_ + params_.sq_off.tail);
    auto* head = reinterpret_cast<std::uint32_t*>(ring_ + params_.sq_off.head);
    __atomic_store_n(tail, *tail + pushed_, __ATOMIC_RELEASE);
    pushed_ = 0;
    for (;;) {
        const unsigned waiting = *tail - __atomic_load_n(head, __ATOMIC_ACQUIRE);
        const int result = calls_.ring_enter(fd_, waiting, 1, kGetEvents);
        if (result >= 0) return 0;
        if (result != -EINTR && result != -EAGAIN && result != -EBUSY) return result;
    }
}

bool Ring::pop(RingCompletion* completion) {
    auto* head = reinterpret_cast<std::uint32_t*>(ring_ + params_.cq_off.head);
    const auto* tail = reinterpret_cast<std::uint32_t*>(ring_ + params_.cq_off.tail);
    const auto mask = *reinterpret_cast<std::uint32_t*>(ring_ + params_.cq_off.ring_mask);
    const std::uint32_t first = *head;
    if (first == __atomic_load_n(tail, __ATOMIC_ACQUIRE)) return false;
    *completion = reinterpret_cast<RingCompletion*>(ring_ + params_.cq_off.cqes)[first & mask];
    __atomic_store_n(head, first + 1, __ATOMIC_RELEASE);
    return true;
}

}  // namespace drivetrain
