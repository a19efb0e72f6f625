// The recursion of chains, forward or backward: a block of steps of a group's rows in one launch.
//
// What leaves a step is logs a, less the whole number nearest to their largest, which is added up
// beside them. To the next step comes, of sums over paths,
//   log v + shifts,  v = u @ factors,  u = exp(a):
// is_proved(v) proves it, and a thread whose v is not proved takes its logarithm from the logs,
// with its own maximum. So no weight is ever lost, and one form is enough. Of best paths it is the
// largest of a + logs, + shifts. What comes plus the step's potentials leaves. A column's shift
// may be large where others are not reached: until then it stays apart.
#include "chain.cuh"

// Writes what comes to each state by a matrix, in logs, but for the returned part of its shift.
template <bool Sums, class T, bool InWarp, int R>
__device__ __forceinline__ T arrive(const Group<T, InWarp, R>& group, const Shared<T, InWarp, R>& shared,
                                    const T* on_chip, long long matrix, int s, T (&came)[R]) {
    const Chain<T>& chain = group.chain;
    const long long entries = (long long)chain.states * chain.states;
    const T *logs = chain.logs + matrix * entries, *shift = chain.shifts + 2 * (matrix * chain.states + group.state);
    if (!Sums) {
        group.maximise(shared.logs, on_chip ? on_chip : logs, came);
        return shift[0];
    }
    group.multiply(shared.weights, on_chip ? on_chip : chain.factors + matrix * entries, came);
    unsigned unproved = 0;  // a bit for each row
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        if (!is_proved(came[r], chain.threshold) && group.is_reached(r, s)) unproved |= 1u << r;
        came[r] = logarithm(came[r]) + shift[1];
    }
    #pragma unroll 1
    for (; unproved; unproved &= unproved - 1) {
        const int row = __ffs(unproved) - 1;
        const T own = log_sum_exp<T>(chain.states, [&](int k) {
            return shared.logs[k].at[row] + logs[k * chain.states + group.state];
        });
        #pragma unroll
        for (int r = 0; r < R; ++r) came[r] = r == row ? own : came[r];
    }
    return shift[0];
}

// Sums over paths, or the largest. InWarp, R: see chain.cuh. OnChip: whether the one matrix of all
// steps, and of all rows of the block, is kept in shared memory.
//
// before: the state that the first step takes up, that of rows that have not begun their start.
// arrived, left: what comes to each step and what leaves it, the state where a row has no such step;
// after: what leaves the rows' last steps.
template <class T, bool Sums, bool InWarp, int R, bool OnChip>
__global__ void __launch_bounds__(threads_at_most(InWarp, R), 1)
chain_steps(Chain<T> chain, Messages<T> before, Messages<T> arrived, Messages<T> left, Messages<T> after) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int K = chain.states;
    const Shared<T, InWarp, R> shared(memory, chain);
    const Group<T, InWarp, R> group(chain);
    const int j = group.state;
    if (OnChip) shared.copy_matrix((Sums ? chain.factors : chain.logs) + group.set * K * K, K * K);

    T a[R], next[R];
    double shift = 0, power = 0;  // of row r, in the thread of state r
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        a[r] = group.has_state ? before.logs[group.row[r] * K + j] : -infinity<T>();
        next[r] = group.potential(r, 0);
        if (j == r) shift = before.shifts[group.row[r]], power = before.powers[group.row[r]];
    }
    for (int s = 0; s < chain.steps; ++s) {
        const long long matrix = group.set * chain.matrices + chain.matrix + s * chain.matrix_step;
        if (group.has_state) {
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                shared.logs[j].at[r] = a[r];
                if (Sums) shared.weights[j].at[r] = exponential(a[r]);
            }
        }
        group.sync();
        T came[R], top[R], x[R], column = 0;
        bool is_reached = false;
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            x[r] = next[r];
            next[r] = group.potential(r, s + 1);  // in time
            if (!group.is_reached(r, s)) continue;
            is_reached = true;
            if (j == r) shift += chain.scales[2 * matrix], power += chain.scales[2 * matrix + 1];
        }
        if (group.has_state && is_reached) {
            column = arrive<Sums>(group, shared, OnChip ? shared.matrix : nullptr, matrix, s, came);
        }
        T columns[R];
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            const bool stays = !group.is_reached(r, s);
            if (!group.has_state || stays) came[r] = a[r];
            columns[r] = stays ? T(0) : column;
        }
        if (arrived.logs) {  // not brought near 0: what its scale has is the matrix's alone
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                if (!group.exists[r]) continue;
                const long long into = s * arrived.step + group.row[r];
                if (group.has_state) arrived.logs[into * K + j] = came[r] + columns[r];
                if (j == r) arrived.shifts[into] = shift, arrived.powers[into] = power;
            }
        }
        #pragma unroll
        for (int r = 0; r < R; ++r) top[r] = came[r] + columns[r] + x[r];
        group.largest(top, shared.exchange);
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            if (!group.exists[r]) continue;
            top[r] = rounded(finite_or_zero(top[r]));
            a[r] = add_four(came[r], x[r], columns[r], -top[r]);
            const long long into = s * left.step + group.row[r];
            if (group.has_state && left.logs) left.logs[into * K + j] = a[r];
            if (j == r) shift += top[r];
            if (j == r && left.logs) left.shifts[into] = shift, left.powers[into] = power;
        }
        if (InWarp) group.sync();
    }
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        if (!group.exists[r]) continue;
        if (group.has_state) after.logs[group.row[r] * K + j] = a[r];
        if (j == r) after.shifts[group.row[r]] = shift, after.powers[group.row[r]] = power;
    }
}
