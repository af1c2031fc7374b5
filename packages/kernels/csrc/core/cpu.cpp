#include "cpu.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace drivetrain {
namespace {

struct Features {
    bool avx2 = false, avx512 = false, avx512_bf16 = false;
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

Features detect() {
    Features found;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool fma = bit(c, 12), xsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
    if (!xsave) return found;
    const std::uint64_t saved = saved_registers();
    constexpr std::uint64_t kYmm = 0x6, kZmm = 0xe6;  // SSE and AVX state; and opmask, upper halves, upper registers
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const unsigned leaves = a;
    found.avx2 = avx && fma && f16c && bit(b, 5) && (saved & kYmm) == kYmm;
    const bool f = bit(b, 16), dq = bit(b, 17), bw = bit(b, 30), vl = bit(b, 31);
    found.avx512 = found.avx2 && f && dq && bw && vl && (saved & kZmm) == kZmm;
    if (found.avx512 && leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = bit(a, 5);
    return found;
}

#else

Features detect() { return {}; }

#endif

std::vector<const KernelTable*> find_usable() {
    const Features features = detect();
    std::vector<const KernelTable*> usable{baseline_kernels()};
    const auto add = [&usable](bool supported, const KernelTable* table) {
        if (supported && table != nullptr) usable.push_back(table);
    };
    add(features.avx2, avx2_kernels());
    add(features.avx512, avx512_kernels());
    add(features.avx512_bf16, avx512_bf16_kernels());
    return usable;
}

std::atomic<const KernelTable*>& chosen() {
    static std::atomic<const KernelTable*> table{usable_kernels().back()};
    return table;
}

}  // namespace

const std::vector<const KernelTable*>& usable_kernels() {
    static const std::vector<const KernelTable*> usable = find_usable();
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
