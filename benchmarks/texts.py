"""What reports say besides figures, by device."""

HOW_TO_READ = {
    "cpu": (
        "Time: median of interleaved rounds ± half the distance between the quartiles. "
        "×: time relative to this library, above 1 is slower. Temporaries: peak allocations "
        "beyond inputs, output and gradients, by tracemalloc for NumPy, and for torch by its "
        "profiler, to which NumPy's are added. Error: largest |out - exact| / max(1, |exact|) "
        "against long double at up to 2000 entries drawn at random; wrong: share of these that "
        "are infinite or NaN where they should not be, or the reverse. In parentheses: the route "
        "that `LogChain.plan` names.\n\n"
        "Cases with gradients: value and all gradients in one call. Error: the largest of the "
        "value's, as above, and of each gradient's: largest |out - exact| / largest |exact| of "
        "that gradient, against long double, or float64 where the case is in float32 and its sums "
        "are long; wrong: the largest share of any. A baseline is of the value and gradients, or "
        "of the value alone where its row says so.\n\n"
        "Cases of paths: the error of a best path is how far its log weight, added up again in "
        "long double, lies below the largest; of marginals it is the largest |out - exact|, "
        "against long double, or float64 where the case is in float32; samples have none. Wrong: "
        "also what is no path of positive weight. All rows share their matrices: one for each "
        "step, or one for all where the title says so and in one chain. hmmlearn takes row after "
        "row in float64; dynamax is compiled before it is timed, and its temporaries are what the "
        "compiler lays out.\n\n"
        "Processes of their own: the time of a whole process, Python's start and imports included, "
        "which finds loops compiled by an earlier one, or has an empty cache and compiles them; "
        "the baseline makes the chain and computes nothing. Their memory is not measured: "
        "temporaries are those of the process that waits."
    ),
    "cuda": (
        "Time: by events on the stream, of calls one after another as a program makes them, what "
        "the host needs for them included; median of interleaved rounds ± half the distance "
        "between the quartiles. On device: the same where calls were queued in advance, so that "
        "the device never waited for the host. Inputs are copies in turn, more than the cache "
        "holds. ×: time relative to this library on CuPy (or on torch, where that was not run), "
        "above 1 is slower. Temporaries: peak of the library's own pool beyond inputs, output and "
        "gradients, with what stays taken between calls, as graphs do. First call: with all that "
        "it compiles; later cases find some of it compiled. Error: largest |out - exact| / "
        "max(1, |exact|) against long double at up to 2000 entries drawn at random, of gradients "
        "relative to the largest entry of each, against long double or float64; wrong: share of "
        "entries that are infinite or NaN where they should not be, or the reverse. Float32 is "
        "multiplied without TF32 by all."
    ),
}

SHORT = {
    "cpu": (
        "Medians of interleaved rounds; temporaries beyond inputs and output; errors against long "
        "double, relative beyond 1, with the share of wrong infinities and NaN where there are "
        "any. × baseline: our time in units of the bare matrix multiplies of the same shapes; of "
        "our own with one thread, with a dense matrix, or of a process without the call, where the "
        "title speaks of that. Fastest other: of all that were run, right or wrong. × ours: its "
        "time in units of ours; below 1 it is faster. All contestants, with spread and memory: "
    ),
    "cuda": (
        "Our figures are for CuPy / for torch. Medians of interleaved rounds, by events on the "
        "stream, of calls one after another; in parentheses without the time that the device "
        "waited for the host, where that is shorter. Temporaries beyond inputs and output; errors "
        "against long double, relative beyond 1, with the share of wrong infinities and NaN where "
        "there are any. × baseline: our time in units of `cupy.matmul` of the same shapes without "
        "TF32, for thin and small matrices of a copy of as many bytes. Fastest other: of all that "
        "were run, right or wrong. × ours: its time in units of ours; below 1 it is faster. All "
        "contestants, with spread and memory: "
    ),
}

GRADIENTS = {
    "cpu": (
        "Values and all gradients in one call. Our figures are for NumPy, through `vjp` / for "
        "torch, through autograd. Temporaries are beyond gradients, too. The error is the largest "
        "of the value's, as above, and of each gradient's, relative to the largest entry of that "
        "gradient, against long double or float64. × baseline: for `logmatmulexp` in units of "
        "three bare matrix multiplies, for chains in units of those of the value alone."
    ),
    "cuda": (
        "Values and all gradients in one call, on CuPy through `vjp` / on torch through autograd. "
        "Temporaries are beyond gradients, too. The error is the largest of the value's, as above, "
        "and of each gradient's, relative to the largest entry of that gradient, against long "
        "double or float64. × baseline: for `logmatmulexp` in units of three bare matrix "
        "multiplies, for chains in units of those of the value alone."
    ),
}

PATHS = (
    "What is inferred about paths. Our figures are for NumPy / for torch. The error of a best path "
    "is how far its log weight lies below the largest, relative beyond 1; that of marginals is "
    "absolute, against long double or float64; samples have none. × baseline: rows of different "
    "lengths in units of our time for all steps of the padded rows, chains from left to right in "
    "units of that for a dense matrix, processes of their own in units of one without the call. "
    "hmmlearn takes row after row in float64; dynamax was compiled before."
)

CAPACITY = (
    "Rows that fit into that memory: inputs, value, gradients and all between, by what more rows "
    "took, and then tried with the pool limited to it. What a row takes is its share of all that."
)

NO_GPU_YET = (
    "No GPU has run these cases yet: there is nothing measured to show. "
    "`python -m benchmarks --device cuda` measures them on yours."
)
