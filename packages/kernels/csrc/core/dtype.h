// Element types that cross the boundary. The numbers are part of the interface with Python (native.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace drivetrain {

enum class Dtype : std::uint8_t { f32 = 0, bf16 = 1, f16 = 2 };

inline std::size_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

}  // namespace drivetrain
