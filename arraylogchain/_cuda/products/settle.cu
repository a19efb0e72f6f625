// log(exp(left) @ exp(right)) from sums over parts of the terms that logmatmulexp.cu has left.
#include "certificate.cuh"
#include "panel.cuh"

// partial [parts, batches, rows, columns] of the panel; flags: of tiles, all 0. A thread an entry.
template <class In>
__global__ void __launch_bounds__(256, 1)
settle(const ComputeOf<In>* partial, int parts, long long all_terms, Panel panel,
       const ComputeOf<In>* row_shifts, const ComputeOf<In>* column_shifts, In* out,
       ProductView view, unsigned char* flags, int tile_rows, int tile_columns) {
    using T = ComputeOf<In>;
    const long long entries = (long long)panel.batches * panel.rows * panel.columns;
    const long long entry = blockIdx.x * 256ll + threadIdx.x;
    if (entry >= entries) return;
    const long long line = quotient(entry, panel.columns);  // of all rows of the batch
    const int column = int(entry - line * panel.columns);
    const long long batch = quotient(line, panel.rows);
    const int row = int(line - batch * panel.rows);
    T sum = 0, excess = 0;  // Kahan: parts may be many, and equal
    #pragma unroll 8
    for (int part = 0; part < parts; ++part) {
        const T corrected = partial[part * entries + entry] - excess;
        const T next = sum + corrected;
        excess = (next - sum) - corrected;
        sum = next;
    }
    bool unproved = false;
    const T value = settled(sum, row_shifts[line], column_shifts[batch * panel.columns + column],
                            line_of_certificate<T>(all_terms), unproved);
    store(out + offset_of<0>(view.batch, panel.first_batch + batch) +
              offset_of<0>(view.rows, panel.first_row + row) +
              offset_of<0>(view.columns, panel.first_column + column),
          value);
    if (!unproved) return;
    const int down = (panel.rows + tile_rows - 1) / tile_rows;
    const int across = (panel.columns + tile_columns - 1) / tile_columns;
    flags[(batch * down + row / tile_rows) * across + column / tile_columns] = 1;
}
