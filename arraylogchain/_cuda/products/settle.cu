// log(exp(left) @ exp(right)) from sums over parts of the terms that logmatmulexp.cu has left.
#include "certificate.cuh"
#include "panel.cuh"

// partial [parts, batches, rows, pitch] of the panel; flags: of tiles, all 0. A thread an entry,
// those of the padding included.
template <class In>
__global__ void __launch_bounds__(256, 1)
settle(const ComputeOf<In>* partial, int parts, long long all_terms, Panel panel,
       const ComputeOf<In>* row_shifts, const ComputeOf<In>* column_shifts, In* out,
       ProductView view, unsigned char* flags, int tile_rows, int tile_columns) {
    using T = ComputeOf<In>;
    const EntryPlace place(panel, blockIdx.x * 256ll + threadIdx.x);
    if (place.batch >= panel.batches || place.column >= panel.columns) return;
    const T sum = sum_of_parts(partial, parts, panel, place.index);
    const T column_shift = column_shifts[(long long)place.batch * panel.columns + place.column];
    bool unproved = false;
    const T value = settled(sum, row_shifts[place.line], column_shift,
                            line_of_certificate<T>(all_terms), unproved);
    store(out + place.offset_in(view, panel), value);
    if (unproved) flags[place.tile(panel, tile_rows, tile_columns)] = 1;
}
