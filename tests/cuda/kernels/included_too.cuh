#pragma once
#include "included.cuh"

struct Pair {
    int small;
    long long large[2];
};
