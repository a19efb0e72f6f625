// Pairs of states of successive steps: what a launch has to know, and the factors of rows.
#pragma once
#include "entries.cuh"
#include "sums.cuh"

// Plain numbers of a launch; reductions.py's PAIRS.
struct Pairs {
    int size;                    // K
    int first, times;            // steps of time t whose pairs (t, t + 1) are summed
    int dtype, out_dtype;        // of matrices and cotangents; of the output
    int in_logs, with_weights;   // whether matrices are logs; whether sums are multiplied by them
    int start_form;              // for chain_start
    int time_splits, row_splits; // blocks that share the sum of an entry; time_splits is 0 where
                                 // steps are not added up
    int accumulate;              // whether to add to what is there
    long long rows, groups;
    long long matrix_stride, row_stride, column_stride, start_stride;
    long long forward_time, back_time;   // the steps of time that histories begin at
    long long out_step, out_split;       // where a group's and a split of rows' output begins
};

// A row's factor: mantissa and exponent, and the size of its cotangent.
template <class T>
struct Factor {
    T m, e, size;
};
