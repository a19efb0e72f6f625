// One operand of a product, as kernels see it whatever its layout.
#pragma once
#include "axes.cuh"

// The lines of an operand are what the other one meets: the rows of the left operand, the columns
// of the right one. Along each line lie the terms of the sums. `VIEW` in operands.py fills it in.
struct View {
    Axes batch;
    Axes lines;
    long long step;   // from a term to the next, in elements
    long long count;  // lines
    int terms_adjoin;  // whether neighbours in memory are terms of a line, else lines
};

// The entries of an operand that a panel of the product needs.
struct Part {
    long long first_batch, batches;
    long long first_line, lines;
    long long pitch;   // of factors: from a term to the next, at least `lines`
    long long blocks;  // of a launch that prepares both operands
};
