// The argument of every kernel: the mirror of rmsnorm-cuda/src/params.rs, field for field.

template <class E>
struct Matrix {
    E* data;
    unsigned long long row_stride; // elements
};

// T: activations; W: weight and bias; R: residual stream; G: gradients of weight and bias. Absent tensors are null.
struct Params {
#if IS_BACKWARD
    Matrix<const R> x; // the input of the norm
#else
    Matrix<const T> x;
#endif
    Matrix<const R> residual;
    Matrix<const T> dy;
    Matrix<const R> dresidual_out;
    Matrix<T> y;
    Matrix<R> residual_out;
    Matrix<T> dx;
    const W* weight;
    const W* bias;
    float* mean;
    float* rstd;
    G* dweight;
    G* dbias;
    float* partials;
    unsigned* locks;
    float* row_sums;
    unsigned long long rows;
    unsigned long long cols;
    unsigned long long chunks;
    unsigned long long partial_rows;
    float eps;
    float weight_offset;
    float share; // 1 / cols
    unsigned unused;
    Matrix<R> dresidual;
#if IS_QUANTIZED || HAS_ROW_GROUPS || NORMS_TWICE || HAS_PARTS
    Matrix<Code> codes;
    Matrix<Code> codes_t; // transposed
    const float* scale;
    void* scales;
    float* amax;
    unsigned* found; // largest magnitude, number of finished blocks
    unsigned long long scales_stride;
    float amax_floor;
    float amax_ceiling;
    Matrix<Code> codes_columnwise; // transposed
    void* scales_columnwise;
    unsigned long long scales_columnwise_stride;
#endif
#if HAS_ROW_GROUPS || NORMS_TWICE || HAS_PARTS
    unsigned long long rows_per_group;
    unsigned long long group_reciprocal; // 2^64 / rows_per_group, rounded up
    unsigned long long x_group_stride;
    unsigned long long residual_group_stride;
    unsigned long long dy_group_stride;
    unsigned long long dresidual_out_group_stride;
    unsigned long long y_group_stride;
    unsigned long long residual_out_group_stride;
    unsigned long long dx_group_stride;
    unsigned long long dresidual_group_stride;
    unsigned long long codes_group_stride;
#endif
#if NORMS_TWICE || HAS_PARTS
    const W* next_weight;
    const W* next_bias;
    float* next_mean;
    float* next_rstd;
#endif
#if HAS_PARTS
    unsigned long long parts; // of x
    unsigned long long part_stride;
#endif
};

static_assert(sizeof(Params) == PARAMS_BYTES, "kernels/params.cuh and rmsnorm-cuda/src/params.rs differ");

// ROW(x, row): the address of a row's first element, in p's matrix x.

#if HAS_ROW_GROUPS
// Elements from row 0 to `row`. Without a division: the product with the reciprocal is the exact
// quotient of 32-bit numbers (D. Lemire, O. Kaser, N. Kurz: Faster remainder by direct computation,
// 2019, theorem 1). The host rejects more rows.
__device__ inline unsigned long long row_start(
    const Params& p, unsigned long long row_stride, unsigned long long group_stride, unsigned row) {
    const unsigned low = p.group_reciprocal, high = p.group_reciprocal >> 32;
    const unsigned group = ((unsigned long long)high * row + __umulhi(low, row)) >> 32;
    return group * group_stride + (row - group * (unsigned)p.rows_per_group) * row_stride;
}
#define ROW(matrix, index) (p.matrix.data + row_start(p, p.matrix.row_stride, p.matrix##_group_stride, index))
#else
#define ROW(matrix, index) (p.matrix.data + (index) * p.matrix.row_stride)
#endif
