// Runs a block function over many tensors: cuts them into pieces for the threads, stages other element types and odd ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "kernel_table.h"

namespace drivetrain {

// What a block function does with one of its streams.
enum class Access : std::uint8_t { read, write_back };

// One operand of every tensor: where it lies and what its elements are.
struct Operand {
    std::vector<std::uintptr_t> addresses;
    std::vector<Dtype> dtypes;
};

// Parallel lists over tensors. `copy`, when not empty, receives the new value of stream 0; address 0 means no copy of that tensor.
struct Operands {
    std::vector<std::int64_t> counts;
    std::vector<Operand> streams;
    Operand copy;
};

// The call: `scalars[i]` belongs to tensor i, or scalars[0] to all of them if it is the only one. `sums`: how many sums the block makes.
struct Loop {
    BlockFunction block;
    std::vector<Access> access;  // of each stream
    std::vector<const void*> scalars;
    std::size_t sums = 0;
};

// Returns sums[tensor * loop.sums + which]. They depend on neither the number of threads nor alignment.
std::vector<double> run_elementwise(const Loop& loop, const Operands& operands, int threads);

// Converts count elements between any two element types, rounding to nearest even. Buffers don't overlap.
void convert(const KernelTable& table, const void* from, Dtype from_dtype, void* to, Dtype to_dtype, std::size_t count);

// Casts tensor by tensor: `from` and `to` are parallel to `counts`.
void cast(const std::vector<std::int64_t>& counts, const Operand& from, const Operand& to, int threads);

}  // namespace drivetrain
