// Which kernel table this CPU, under this operating system, may use.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace drivetrain {

// Tables that are usable here, slowest first. The first is always the baseline.
const std::vector<const KernelTable*>& usable_kernels();

// The table in use: the fastest usable one, unless `choose_kernels` said otherwise.
const KernelTable& kernels();

// Use the table of that name from now on, on all threads. Throws std::invalid_argument when it isn't usable here.
void choose_kernels(const std::string& name);

}  // namespace drivetrain
