// What kernels include by this name is in halves.h here.
#pragma once
#include "halves.h"
