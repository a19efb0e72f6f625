// The recursion of chains, forward or backward: a block of steps of a group's rows in one launch.
//
// What leaves a step is logs a, less the whole number nearest to their largest, which is added up
// beside them. To the next step comes, of sums over paths,
//   log v + shifts,  v = u @ factors,  u = exp(a):
// is_proved(v) proves it, and a thread whose v is not proved takes its logarithm from the logs,
// with its own maximum. So no weight is ever lost, and one form is enough. Of best paths it is the
// largest of a + logs. What comes plus the step's potentials leaves.
#include "chain.cuh"

// Writes what comes to each state by a matrix, in logs.
template <bool Sums, class T, bool InWarp, int R>
__device__ __forceinline__ void arrive(const Group<T, InWarp, R>& group, const Shared<T, InWarp, R>& shared,
                                       const T* on_chip, long long matrix, int s, T (&came)[R]) {
    const Chain<T>& chain = group.chain;
    const long long entries = (long long)chain.states * chain.states;
    const T* logs = chain.logs + matrix * entries;
    if (!Sums) return group.maximise(shared.logs, on_chip ? on_chip : logs, came);

    group.multiply(shared.weights, on_chip ? on_chip : chain.factors + matrix * entries, came);
    const T shift = chain.shifts[matrix * chain.states + group.state];
    unsigned unproved = 0;  // a bit for each row
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        if (!is_proved(came[r], chain.threshold) && group.is_reached(r, s)) unproved |= 1u << r;
        came[r] = logarithm(came[r]) + shift;
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
}

// Sums over paths, or the largest. InWarp, R: see chain.cuh. OnChip: whether the one matrix of all
// steps, and of all rows of the block, is kept in shared memory.
//
// before: the state that the first step takes up, that of rows that have not begun their start.
// arrived, left: what comes to each step and what leaves it; after: what leaves the rows' last steps.
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
        if (before.shifts && j == r) shift = before.shifts[group.row[r]], power = before.powers[group.row[r]];
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
        T came[R], top[R], x[R];
        bool is_reached = false;
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            x[r] = next[r];
            next[r] = group.potential(r, s + 1);  // in time
            is_reached = is_reached || group.is_reached(r, s);
        }
        if (group.has_state && is_reached) arrive<Sums>(group, shared, OnChip ? shared.matrix : nullptr, matrix, s, came);
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            if (!group.has_state || !group.is_reached(r, s)) came[r] = a[r];
            top[r] = came[r] + x[r];
        }
        group.largest(top, shared.exchange);
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            if (!group.takes(r, s)) continue;
            top[r] = rounded(finite_or_zero(top[r]));
            a[r] = add_three(came[r], x[r], -top[r]);
            const long long into_arrived = s * arrived.step + group.row[r], into_left = s * left.step + group.row[r];
            if (group.has_state && arrived.logs) arrived.logs[into_arrived * K + j] = came[r];
            if (group.has_state && left.logs) left.logs[into_left * K + j] = a[r];
            if (j != r) continue;
            if (Sums && group.is_reached(r, s)) shift += chain.scales[2 * matrix], power += chain.scales[2 * matrix + 1];
            if (arrived.shifts) arrived.shifts[into_arrived] = shift, arrived.powers[into_arrived] = power;
            shift += top[r];
            if (left.shifts) left.shifts[into_left] = shift, left.powers[into_left] = power;
        }
        if (InWarp) group.sync();
    }
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        if (!group.exists[r]) continue;
        if (group.has_state) after.logs[group.row[r] * K + j] = a[r];
        if (after.shifts && j == r) after.shifts[group.row[r]] = shift, after.powers[group.row[r]] = power;
    }
}
