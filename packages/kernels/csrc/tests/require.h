// What the files of tests share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

inline void require(bool condition, const std::string& what) {
    if (condition) return;
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    std::exit(1);
}
