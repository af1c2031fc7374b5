#include "system_calls.h"

#include <cerrno>

#include <sys/syscall.h>
#include <unistd.h>

namespace drivetrain {

ssize_t SystemCalls::read(int fd, void* to, std::size_t bytes, std::int64_t offset) {
    const ssize_t result = pread(fd, to, bytes, static_cast<off_t>(offset));
    return result < 0 ? -errno : result;
}

ssize_t SystemCalls::write(int fd, const void* from, std::size_t bytes, std::int64_t offset) {
    const ssize_t result = pwrite(fd, from, bytes, static_cast<off_t>(offset));
    return result < 0 ? -errno : result;
}

#if defined(__linux__)

// The same numbers on every architecture, since these calls are younger than the common table.
constexpr long kRingSetup = 425, kRingEnter = 426, kRingRegister = 427;
constexpr unsigned kRegisterBuffers = 0;

int SystemCalls::ring_setup(unsigned entries, RingParams* params) {
    const long result = syscall(kRingSetup, entries, params);
    return result < 0 ? -errno : static_cast<int>(result);
}

int SystemCalls::ring_enter(int fd, unsigned submit, unsigned complete, unsigned flags) {
    const long result = syscall(kRingEnter, fd, submit, complete, flags, nullptr, 0);
    return result < 0 ? -errno : static_cast<int>(result);
}

int SystemCalls::ring_register_memory(int fd, const MemoryRange* ranges, unsigned count) {
    const long result = syscall(kRingRegister, fd, kRegisterBuffers, ranges, count);
    return result < 0 ? -errno : static_cast<int>(result);
}

#else

int SystemCalls::ring_setup(unsigned, RingParams*) { return -ENOSYS; }
int SystemCalls::ring_enter(int, unsigned, unsigned, unsigned) { return -ENOSYS; }
int SystemCalls::ring_register_memory(int, const MemoryRange*, unsigned) { return -ENOSYS; }

#endif

std::int32_t SystemCalls::ring_result(bool, std::size_t, std::int32_t result) { return result; }

SystemCalls& SystemCalls::real() {
    static SystemCalls calls;
    return calls;
}

}  // namespace drivetrain
