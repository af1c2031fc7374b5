#include "cpu.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace drivetrain {
namespace {

struct Features {
    bool avx2 = false, avx512 = false, avx512_vnni = false, avx512_bf16 = false, amx = false;
};

#if defined(__x86_64__) || defined(__i386__)

bool bit(unsigned word, int index) { return (word >> index & 1u) != 0; }

// XCR0: which register files the operating system saves at a context switch. A CPU may list an instruction set whose registers the
// system does not save; using it would corrupt them.
std::uint64_t saved_registers() {
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<std::uint64_t>(high) << 32 | low;
}

// Linux saves tiles for processes that ask for it, and may refuse.
bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long kGetPermissions = 0x1022, kRequestPermission = 0x1023, kTileData = 18;  // of asm/prctl.h since Linux 5.16
    std::uint64_t permitted = 0;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 && syscall(SYS_arch_prctl, kGetPermissions, &permitted) == 0 &&
           (permitted >> kTileData & 1u) != 0;
#else
    return false;
#endif
}

Features detect() {
    Features found;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool fma = bit(c, 12), xsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
    if (!xsave) return found;
    const std::uint64_t saved = saved_registers();
    constexpr std::uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;  // SSE and AVX state; and opmask, upper halves, upper registers; shapes and data of tiles
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const unsigned leaves = a;
    found.avx2 = avx && fma && f16c && bit(b, 5) && (saved & kYmm) == kYmm;
    const bool f = bit(b, 16), dq = bit(b, 17), bw = bit(b, 30), vl = bit(b, 31);
    found.avx512 = found.avx2 && f && dq && bw && vl && (saved & kZmm) == kZmm;
    found.avx512_vnni = found.avx512 && bit(c, 11);
    const bool amx = bit(d, 22) && bit(d, 24) && bit(d, 25) && (saved & kTiles) == kTiles;  // bfloat16, tiles, int8
    if (found.avx512_vnni && leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = bit(a, 5);
    found.amx = found.avx512_bf16 && amx && may_use_tiles();
    return found;
}

#else

Features detect() { return {}; }

#endif

// A table is put together of elementwise loops and loops of products, which have instruction sets of their own.
std::vector<KernelTable> find_usable() {
    const Features features = detect();
    std::vector<KernelTable> usable;
    const auto add = [&usable](bool supported, const char* name, const KernelTable* loops, const MatmulKernels* products) {
        if (!supported || loops == nullptr || products == nullptr) return;
        usable.push_back(*loops);
        usable.back().name = name;
        usable.back().matmul = products;
    };
    add(true, baseline_kernels()->name, baseline_kernels(), baseline_matmul());
    add(features.avx2, "avx2", avx2_kernels(), avx2_matmul());
    add(features.avx512, "avx512", avx512_kernels(), avx512_matmul());
    add(features.avx512_vnni, "avx512_vnni", avx512_kernels(), avx512_vnni_matmul());
    add(features.avx512_bf16, "avx512_bf16", avx512_bf16_kernels(), avx512_bf16_matmul());
    add(features.amx, "amx", avx512_bf16_kernels(), amx_matmul());
    return usable;
}

std::vector<const KernelTable*> addresses(const std::vector<KernelTable>& tables) {
    std::vector<const KernelTable*> found;
    for (const KernelTable& table : tables) found.push_back(&table);
    return found;
}

std::atomic<const KernelTable*>& chosen() {
    static std::atomic<const KernelTable*> table{usable_kernels().back()};
    return table;
}

}  // namespace

const std::vector<const KernelTable*>& usable_kernels() {
    static const std::vector<KernelTable> tables = find_usable();
    static const std::vector<const KernelTable*> usable = addresses(tables);
    return usable;
}

const KernelTable& kernels() { return *chosen().load(std::memory_order_acquire); }

void choose_kernels(const std::string& name) {
    std::string names;
    for (const KernelTable* table : usable_kernels()) {
        if (name == table->name) {
            chosen().store(table, std::memory_order_release);
            return;
        }
        names += names.empty() ? table->name : std::string(", ") + table->name;
    }
    throw std::invalid_argument("instruction set '" + name + "' is not usable on this machine; usable: " + names);
}

}  // namespace drivetrain
