#include "ring.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/eventfd.h>
#endif

namespace drivetrain {
namespace {

constexpr std::uint32_t kSingleMap = 1u << 0;  // both rings in one mapping: Linux 5.4
constexpr off_t kEntriesOffset = 0x10000000;
constexpr std::uint8_t kNop = 0, kReadHeld = 4, kWriteHeld = 5, kPoll = 6, kRead = 22, kWrite = 23;
constexpr unsigned kGetEvents = 1;
constexpr std::uint64_t kWoken = UINT64_MAX;  // the tag of the watch for `wake`
constexpr std::size_t kLargestHeld = std::size_t{1} << 30;

// One thread uses the ring, so completions may be worked off when it asks for them (Linux 6.1) or at least needn't interrupt it (5.19).
constexpr std::uint32_t kCoopTaskrun = 1u << 8, kSingleIssuer = 1u << 12, kDeferTaskrun = 1u << 13;

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

int event_descriptor() {
#if defined(__linux__)
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
#else
    return errno = ENOSYS, -1;
#endif
}

}  // namespace

Ring::Ring(SystemCalls& calls, unsigned entries) : calls_(calls) {
    try {
        set_up(entries + 1);  // the watch for `wake` is one
        map();
        prove();
        wake_fd_ = event_descriptor();
        if (wake_fd_ < 0) fail(errno, "eventfd");
        watch();
    } catch (...) {
        release();
        throw;
    }
}

Ring::~Ring() { release(); }

void Ring::set_up(unsigned entries) {
    for (const std::uint32_t flags : {kSingleIssuer | kDeferTaskrun, kCoopTaskrun, 0u}) {
        params_ = RingParams{};
        params_.flags = flags;
        fd_ = calls_.ring_setup(entries, &params_);
        if (fd_ != -EINVAL) break;
    }
    if (fd_ < 0) fail(-fd_, "io_uring_setup");
}

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

void Ring::release() {
    if (entries_ != nullptr) munmap(entries_, entry_bytes_);
    if (ring_ != nullptr) munmap(ring_, ring_bytes_);
    if (fd_ >= 0) close(fd_);
    if (wake_fd_ >= 0) close(wake_fd_);
}

// A sandbox may allow the setup and forbid the use.
void Ring::prove() {
    next().opcode = kNop;
    const int error = submit_and_wait(1);
    if (error < 0) fail(-error, "io_uring_enter");
    RingCompletion completion;
    if (!pop(&completion) || completion.result < 0) fail(EIO, "a no-op through io_uring");
}

int Ring::hold(const std::vector<MemoryRange>& memory) {
    std::vector<MemoryRange> pieces;
    for (const MemoryRange& range : memory) {
        for (std::size_t at = 0; at < range.bytes; at += kLargestHeld) {
            pieces.push_back({range.data + at, std::min(kLargestHeld, range.bytes - at)});
        }
    }
    std::sort(pieces.begin(), pieces.end(), [](const MemoryRange& a, const MemoryRange& b) { return a.data < b.data; });
    if (pieces.empty()) return 0;
    const int result = calls_.ring_register_memory(fd_, pieces.data(), static_cast<unsigned>(pieces.size()));
    if (result < 0) return -result;
    held_ = std::move(pieces);
    return 0;
}

// The number of the held piece that all of these bytes lie in, or -1.
int Ring::held_at(const char* data, std::size_t bytes) const {
    auto after = std::upper_bound(held_.begin(), held_.end(), data, [](const char* at, const MemoryRange& piece) { return at < piece.data; });
    if (after == held_.begin()) return -1;
    --after;
    return data + bytes <= after->data + after->bytes ? static_cast<int>(after - held_.begin()) : -1;
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

void Ring::push(bool writes, int fd, char* data, std::size_t bytes, std::int64_t offset, std::uint64_t tag) {
    const int held = held_at(data, bytes);
    RingSubmission& entry = next();
    entry.opcode = held >= 0 ? (writes ? kWriteHeld : kReadHeld) : (writes ? kWrite : kRead);
    entry.buffer = static_cast<std::uint16_t>(held >= 0 ? held : 0);
    entry.fd = fd;
    entry.address = reinterpret_cast<std::uintptr_t>(data);
    entry.length = static_cast<std::uint32_t>(bytes);
    entry.offset = static_cast<std::uint64_t>(offset);
    entry.user_data = tag;
}

void Ring::watch() {
    RingSubmission& entry = next();
    entry.opcode = kPoll;
    entry.fd = wake_fd_;
    entry.operation_flags = POLLIN;
    entry.user_data = kWoken;
}

void Ring::wake() {
    const std::uint64_t one = 1;
    if (write(wake_fd_, &one, sizeof one) < 0) return;  // it is full of wakes already
}

int Ring::submit_and_wait(unsigned completions) {
    auto* tail = reinterpret_cast<std::uint32_t*>(ring_ + params_.sq_off.tail);
    auto* head = reinterpret_cast<std::uint32_t*>(ring_ + params_.sq_off.head);
    __atomic_store_n(tail, *tail + pushed_, __ATOMIC_RELEASE);
    pushed_ = 0;
    for (;;) {
        const unsigned waiting = *tail - __atomic_load_n(head, __ATOMIC_ACQUIRE);
        const int result = calls_.ring_enter(fd_, waiting, completions, kGetEvents);
        if (result >= 0) return 0;
        if (result != -EINTR && result != -EAGAIN && result != -EBUSY) return result;
    }
}

bool Ring::pop(RingCompletion* completion) {
    auto* head = reinterpret_cast<std::uint32_t*>(ring_ + params_.cq_off.head);
    const auto* tail = reinterpret_cast<std::uint32_t*>(ring_ + params_.cq_off.tail);
    const auto mask = *reinterpret_cast<std::uint32_t*>(ring_ + params_.cq_off.ring_mask);
    for (;;) {
        const std::uint32_t first = *head;
        if (first == __atomic_load_n(tail, __ATOMIC_ACQUIRE)) return false;
        *completion = reinterpret_cast<RingCompletion*>(ring_ + params_.cq_off.cqes)[first & mask];
        __atomic_store_n(head, first + 1, __ATOMIC_RELEASE);
        if (completion->user_data != kWoken) return true;
        std::uint64_t wakes;
        if (read(wake_fd_, &wakes, sizeof wakes) >= 0 || errno == EAGAIN) watch();
    }
}

}  // namespace drivetrain
