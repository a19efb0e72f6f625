#pragma once
#include "included_too.cuh"

constexpr unsigned kAllLanes = 0xffffffffu;
